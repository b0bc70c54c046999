"""Stable Diffusion 1.x, 2.x and XL (arXiv 2112.10752, 2307.01952): diffusers' `UNet2DConditionModel` in a pipeline.

Its tensors keep their names, and their bytes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megadit.models.convert.tensor_map import Entry, rename
from megadit.models.ddpm import BETAS, DDPM_STEPS
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json
from megadit.models.unet_config import DIFFUSERS_CLASS, FIXED, USUAL, UNetConfig
from megadit.models.weights import network_shapes

FOLDER = "unet"
"""Where a pipeline has it."""
PREDICTIONS = {"epsilon": "noise", "v_prediction": "velocity"}
"""As diffusers' schedulers call what a network predicts -> our word."""
_OURS = "network."
_OF_PIPELINE = ("prediction", "pixels_per_latent")
SETTINGS = {*USUAL, *FIXED, *_OF_PIPELINE}
"""Those of diffusers' config.json and of the pipeline; what newer ones add may be another network."""


def read_pipeline(path: Path) -> dict[str, Any]:
    """What the folders beside a network tell of it: what it predicts, and how many pixels a latent has along a side.

    Raises:
        UserError: if they are missing, or for a network that was trained at other noise levels.
    """
    scheduler, vae = path.parent / "scheduler/scheduler_config.json", path.parent / "vae/config.json"
    for needed in (scheduler, vae):
        if not needed.is_file():
            raise UserError(f"{path} is a {DIFFUSERS_CLASS} without {needed}, which belongs to it: give its pipeline")
    values, betas = read_json(scheduler), BETAS["stable_diffusion"]
    for name, only in {
        "beta_schedule": "scaled_linear",
        "beta_start": betas.first,
        "beta_end": betas.last,
        "num_train_timesteps": DDPM_STEPS,
    }.items():
        if values.get(name) != only:
            raise UserError(f"{scheduler}: {name}={values.get(name)!r:.60} is not supported; it must be {only}")
    for name in ("trained_betas", "rescale_betas_zero_snr"):
        if values.get(name):
            raise UserError(f"{scheduler}: {name} is not supported: its noise levels are none of Stable Diffusion's")
    predicts = values.get("prediction_type", "epsilon")
    if predicts not in PREDICTIONS:
        raise UserError(f"{scheduler}: prediction_type={predicts!r:.60} is not one of {', '.join(PREDICTIONS)}")
    widths = read_json(vae).get("block_out_channels") or ()
    return {"prediction": PREDICTIONS[predicts], "pixels_per_latent": 2 ** (len(widths) - 1)}


def config_from_diffusers(values: Mapping[str, Any]) -> UNetConfig:
    """The configuration that diffusers' config.json and `read_pipeline` stand for.

    Raises:
        UserError: for a network of this class that reads other things than Stable Diffusion's.
    """
    for name, only in FIXED.items():
        if values.get(name, only) != only:
            raise UserError(f"{DIFFUSERS_CLASS} with {name}={values[name]!r:.60} is not supported: it must be {only!r}")
    settings = {name: values.get(name, usual) for name, usual in USUAL.items()}
    return UNetConfig.from_dict({"settings": settings} | {name: values[name] for name in _OF_PIPELINE})


def config_to_diffusers(config: UNetConfig) -> dict[str, Any]:
    """The inverse of `config_from_diffusers`, without what stands in other folders of a pipeline."""
    return {"_class_name": DIFFUSERS_CLASS, **FIXED, **config.settings}


def diffusers_entries(config: UNetConfig) -> list[Entry]:
    return [rename(name, name.removeprefix(_OURS)) for name in network_shapes(config)]
