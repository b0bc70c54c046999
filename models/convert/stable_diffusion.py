"""Stable Diffusion 1.x, 2.x and XL (arXiv 2112.10752, 2307.01952): diffusers' `UNet2DConditionModel` in a pipeline.

The tensors keep their names and bytes.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megadit.models.configs.unet import DIFFUSERS_CLASS, FIXED, USUAL, UNetConfig
from megadit.models.convert.tensor_map import Entry, rename
from megadit.models.diffusion.parameterization import BETAS, DDPM_STEPS
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_object
from megadit.models.storage.components import network_shapes

FOLDER = "unet"
"""Folder of the network in a pipeline."""
PREDICTIONS = {"epsilon": "noise", "v_prediction": "velocity"}
"""diffusers' name of the prediction type -> ours."""
NOISE_SCHEDULE = {
    "beta_schedule": "scaled_linear",
    "beta_start": BETAS["stable_diffusion"].first,
    "beta_end": BETAS["stable_diffusion"].last,
    "num_train_timesteps": DDPM_STEPS,
}
"""Fields of diffusers' schedulers with which these networks were trained."""
_OURS = "network."
_OF_PIPELINE = ("prediction", "pixels_per_latent")
_BLOCK = re.compile(r"(?P<side>down|up)_blocks\.(?P<level>\d+)\.(?P<kind>\w+)\.(?P<number>\d+)\.(?P<tail>.+)")
_ORIGINAL = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_ORIGINAL_OF_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
"""Layers in diffusers -> in the original release; attention layers have the same names."""
SETTINGS = {*USUAL, *FIXED, *_OF_PIPELINE}
"""Known settings of diffusers' config.json and of the pipeline; unknown ones may mean another network."""


def read_pipeline(path: Path) -> dict[str, Any]:
    """Read settings of a network from other folders of its pipeline: prediction type, and pixels per latent along a
    side.

    Raises:
        UserError: if they are missing, or for a network trained with another noise schedule.
    """
    scheduler, vae = path.parent / "scheduler/scheduler_config.json", path.parent / "vae/config.json"
    for needed in (scheduler, vae):
        if not needed.is_file():
            raise UserError(f"{path} is a {DIFFUSERS_CLASS} without {needed}, which belongs to it: give its pipeline")
    values = read_object(scheduler)
    for name, only in NOISE_SCHEDULE.items():
        if values.get(name) != only:
            raise UserError(f"{scheduler}: {name}={values.get(name)!r:.60} is not supported; it must be {only}")
    for name in ("trained_betas", "rescale_betas_zero_snr"):
        if values.get(name):
            raise UserError(f"{scheduler}: {name} is not supported: its noise levels are not Stable Diffusion's")
    for name in ("thresholding", "clip_sample"):
        if values.get(name):
            raise UserError(f"{scheduler}: {name} is not supported: it would change what the network predicts")
    predicts = values.get("prediction_type", "epsilon")
    if predicts not in PREDICTIONS:
        raise UserError(f"{scheduler}: prediction_type={predicts!r:.60} is not one of {', '.join(PREDICTIONS)}")
    widths = read_object(vae).get("block_out_channels") or ()
    return {"prediction": PREDICTIONS[predicts], "pixels_per_latent": 2 ** (len(widths) - 1)}


def config_from_diffusers(values: Mapping[str, Any]) -> UNetConfig:
    """Convert the configuration of diffusers' config.json, with the settings of `read_pipeline`.

    Raises:
        UserError: for a network of this class with other inputs than Stable Diffusion's.
    """
    for name, only in FIXED.items():
        if values.get(name, only) != only:
            raise UserError(f"{DIFFUSERS_CLASS} with {name}={values[name]!r:.60} is not supported: it must be {only!r}")
    settings = {name: values.get(name, usual) for name, usual in USUAL.items()}
    return UNetConfig.from_dict({"settings": settings} | {name: values[name] for name in _OF_PIPELINE})


def config_to_diffusers(config: UNetConfig) -> dict[str, Any]:
    """The inverse of `config_from_diffusers`, without settings from other folders of a pipeline."""
    return {"_class_name": DIFFUSERS_CLASS, **FIXED, **config.settings}


def prediction_type(config: UNetConfig) -> str:
    """diffusers' name of what the network predicts, a field of its scheduler."""
    return next(theirs for theirs, ours in PREDICTIONS.items() if ours == config.prediction)


def diffusers_entries(config: UNetConfig) -> list[Entry]:
    return [rename(name, name.removeprefix(_OURS)) for name in network_shapes(config)]


def original_entries(config: UNetConfig) -> list[Entry]:
    """Names of the original release, which kohya's scripts use in adapters of XL."""
    return [rename(name, _original_name(name.removeprefix(_OURS), config.settings)) for name in network_shapes(config)]


def _original_name(name: str, settings: Mapping[str, Any]) -> str:
    """Blocks of each side are numbered in order, one for each layer or resampling."""
    found = _BLOCK.fullmatch(name)
    if found is None:
        layer = next(layer for layer in _ORIGINAL if name.startswith(f"{layer}."))
        head, tail = _ORIGINAL[layer], name.removeprefix(f"{layer}.")
        return f"{head}.{_of_resnet(tail) if 'resnets' in layer else tail}"
    side, kind, tail = found["side"], found["kind"], found["tail"]
    level, number, blocks = int(found["level"]), int(found["number"]), settings["layers_per_block"] + 1
    if kind == "downsamplers":
        return f"input_blocks.{blocks * (level + 1)}.0.{tail.replace('conv', 'op')}"
    if kind == "upsamplers":
        behind = 1 + settings["up_block_types"][level].startswith("CrossAttn")
        return f"output_blocks.{blocks * (level + 1) - 1}.{behind}.{tail}"
    block = (
        f"input_blocks.{1 + blocks * level + number}" if side == "down" else f"output_blocks.{blocks * level + number}"
    )
    return f"{block}.0.{_of_resnet(tail)}" if kind == "resnets" else f"{block}.1.{tail}"


def _of_resnet(name: str) -> str:
    layer, _, kind = name.rpartition(".")
    return f"{_ORIGINAL_OF_RESNET[layer]}.{kind}"
