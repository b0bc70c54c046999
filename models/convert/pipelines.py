"""Whole pipelines of diffusers: `model_index.json`, and the published encoders around a network.

`DiffusionPipeline.from_pretrained` and the servers that read such folders find every component by this file.
"""

import shutil
from pathlib import Path
from typing import Any

from megadit.models.configs.protocol import NetworkConfig
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_object, write_json
from megadit.models.storage import components as parts
from megadit.models.text_encoders import ClassLabels, CLIPTextEncoder, QwenVLTextEncoder, T5TextEncoder, TextEncoder
from megadit.models.text_encoders.image_encoder import ImageEncoder
from megadit.models.text_encoders.published import PublishedNetwork

FILE = "model_index.json"
DIFFUSERS_VERSION = "0.37.0"
"""The oldest version with all of these classes (0.36 lacks Predict2.5's). SGLang takes a folder without a version for a
language model."""
Component = list[str | None]
"""[library, class] of a component; [None, None] if there is none."""
ABSENT: Component = [None, None]
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def pipeline_class(kind: str, config: NetworkConfig) -> str:
    """Name of diffusers' pipeline for a network; `kind` is that of `published_defaults.kind_of`."""
    has_frames = config.conditioning_sigma is not None
    if kind == "wan":
        return "WanPipeline" if config.conditioning.is_among else "WanImageToVideoPipeline"
    if kind == "stable_diffusion":
        return "StableDiffusionPipeline" if config.pooled_size is None else "StableDiffusionXLPipeline"
    return {
        "cosmos1": "CosmosVideoToWorldPipeline" if has_frames else "CosmosTextToWorldPipeline",
        "cosmos2": "Cosmos2VideoToWorldPipeline" if has_frames else "Cosmos2TextToImagePipeline",
        "cosmos2_5": "Cosmos2_5_PredictBasePipeline",
        "dit": "DiTPipeline",
    }[kind]


def write_pipeline(
    folder: Path,
    kind: str,
    config: NetworkConfig,
    text_encoder: TextEncoder,
    image_encoder: ImageEncoder | None,
    boundary: float | None,
) -> None:
    """Complete a folder with networks, VAE and scheduler by its encoders and `model_index.json`.

    `boundary` is the noise level t below which a low-noise expert denoises.

    Raises:
        UserError: if a component is missing in the folder, or diffusers has none like it, or its files are not on this
            machine.
    """
    own = {path.parent.name: _class_of(path) for path in sorted(folder.glob("*/*config.json"))}
    if missing := {"vae", "scheduler"} - own.keys():
        raise UserError(f"diffusers has no {' and no '.join(sorted(missing))} like that of this bundle")
    index: dict[str, Any] = {"_class_name": pipeline_class(kind, config), "_diffusers_version": DIFFUSERS_VERSION}
    index |= {name: ["diffusers", class_name] for name, class_name in own.items()}
    index |= _write_text_encoder(folder, text_encoder)
    index |= _other_components(kind, config) | _write_image_encoder(folder, image_encoder)
    if kind == "wan":
        index |= {"transformer_2": index.get("transformer_2", ABSENT), "boundary_ratio": boundary}
        index["expand_timesteps"] = config.conditioning.is_among and config.conditioning_sigma is not None
    if kind == "stable_diffusion" and config.pooled_size is not None:
        index["force_zeros_for_empty_prompt"] = text_encoder.empty_text == "zeros"
    if isinstance(text_encoder, ClassLabels):
        index["id2label"] = {str(number): name for number, name in enumerate(text_encoder.names)}
    write_json(folder / FILE, index)


def _class_of(config: Path) -> str:
    return read_object(config)["_class_name"]


def _other_components(kind: str, config: NetworkConfig) -> dict[str, Any]:
    """Components that a pipeline may lack."""
    if kind.startswith("cosmos"):
        return {"safety_checker": ABSENT}
    if kind == "stable_diffusion":
        safety = {} if config.pooled_size is not None else {"safety_checker": ABSENT, "requires_safety_checker": False}
        return {"feature_extractor": ABSENT, "image_encoder": ABSENT, **safety}
    return {}


def _write_text_encoder(folder: Path, encoder: TextEncoder) -> dict[str, Component]:
    if isinstance(encoder, ClassLabels):
        return {}
    if not isinstance(encoder, (T5TextEncoder, CLIPTextEncoder, QwenVLTextEncoder)):
        raise UserError(
            "diffusers has no text encoder like that of this bundle: train with a T5 or a CLIP for programs that use it"
        )
    found: dict[str, Component] = {}
    for number, network in enumerate(encoder.published, start=1):
        suffix = "" if number == 1 else f"_{number}"
        found |= _write_network(folder, f"text_encoder{suffix}", f"tokenizer{suffix}", network)
    return found


def _write_image_encoder(folder: Path, encoder: ImageEncoder | None) -> dict[str, Component]:
    return {} if encoder is None else _write_network(folder, "image_encoder", "image_processor", encoder.published)


def _write_network(folder: Path, name: str, words_name: str, network: PublishedNetwork) -> dict[str, Component]:
    """Copy the files of a network of transformers, or save one that is published in another form; and save what
    prepares its input."""
    place, words = network.place, network.load_words()
    weights = [file for pattern in _WEIGHTS for file in place.glob(pattern)] if place.is_dir() else []
    if weights:
        (folder / name).mkdir()
        for file in (place / parts.CONFIG_FILE, *weights):
            shutil.copyfile(file, folder / name / file.name)
    else:
        network.load().save_pretrained(folder / name)
    words.save_pretrained(folder / words_name)
    return {name: ["transformers", network.class_name], words_name: ["transformers", type(words).__name__]}
