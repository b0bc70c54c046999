"""Writes networks in the forms in which they were published: diffusers', transformers', and the original releases."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megadit.models.configs.protocol import NetworkConfig
from megadit.models.convert import class_dit, cosmos, nemo, nemo_moviegen, stable_diffusion, wan
from megadit.models.convert.converted import to_theirs
from megadit.models.convert.published import FOLDERS, OF_TRANSFORMERS, TRANSFORMERS, WEIGHTS
from megadit.models.convert.tensor_map import Entry
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json
from megadit.models.storage.tensor_source import TensorSource, write_safetensors, write_shards
from megadit.models.text_encoders import TextEncoder
from megadit.models.tokenizers import VideoTokenizer

_OF_FAMILY = {"cosmos": cosmos, "dit": class_dit, "wan": wan, "stable_diffusion": stable_diffusion}
"""Family -> the module that converts it to diffusers."""


def diffusers_folder(config: NetworkConfig, part: str) -> str:
    """Folder in diffusers' pipelines of the network in the folder `part` of a bundle."""
    return FOLDERS.get(config.family, part)


def diffusers_entries(config: NetworkConfig) -> list[Entry] | None:
    """Map of a network's tensors to diffusers' names; None if diffusers has no such network."""
    return _OF_FAMILY[config.family].diffusers_entries(config) if config.family in _OF_FAMILY else None


def original_entries(config: NetworkConfig) -> list[Entry] | None:
    """Map of a network's tensors to the names of the original release; None without one."""
    entries_of = {
        ("cosmos", None): cosmos.released_entries,
        ("cosmos", "predict2_5"): cosmos.released_entries,
        ("dit", None): class_dit.original_entries,
        ("wan", None): wan.released_entries,
        ("nemo", None): nemo.entries,
        ("dfm", None): nemo.entries,
        ("moviegen", "nemo"): nemo_moviegen.entries,
    }
    form = config.family, getattr(config, "compat", None)
    return entries_of[form](config) if form in entries_of else None


def pipeline_entries(config: NetworkConfig) -> list[Entry] | None:
    """Map of a network's tensors to the names of an original release as one pipeline file, which is not written; None
    without one."""
    return stable_diffusion.original_entries(config) if config.family == "stable_diffusion" else None


def write_diffusers(
    out: Path, config: NetworkConfig, tensors: TensorSource, sample_size: int, text_projection: Mapping[str, Tensor]
) -> None:
    """Write config.json and weights of a network for diffusers, including `text_projection` (see `Published`).

    Raises:
        UserError: if diffusers has no such network.
    """
    entries = diffusers_entries(config)
    if entries is None:
        raise UserError(f"diffusers has no network of the family {config.family}; only of {', '.join(_OF_FAMILY)}")
    _check_positions(config)
    sizes = (sample_size,) if config.family == "dit" else ()
    values = _OF_FAMILY[config.family].config_to_diffusers(config, *sizes)
    settings, more = cosmos.projection_to_diffusers(text_projection)
    write_json(out / "config.json", values | settings)
    write_shards(out, WEIGHTS, to_theirs(tensors, entries).with_others(more))


def write_transformers(
    out: Path, config: NetworkConfig, tensors: TensorSource, tokenizer: VideoTokenizer, text_encoder: TextEncoder
) -> None:
    """Write config.json, weights and preprocessing files for transformers.

    Raises:
        UserError: if transformers has no such network.
    """
    known = TRANSFORMERS.get(config.family)
    if known is None:
        raise UserError(f"transformers has no network of the family {config.family}; only of {', '.join(TRANSFORMERS)}")
    write_json(out / "config.json", known.config_to_transformers(config, text_encoder))
    known.write_processor(out, config, tokenizer, text_encoder)
    write_shards(out, OF_TRANSFORMERS, to_theirs(tensors, known.entries(config)))


def write_original(
    out: Path, config: NetworkConfig, tensors: TensorSource, text_projection: Mapping[str, Tensor]
) -> None:
    """Write the tensors, including `text_projection` (see `Published`), under the names of the original release.

    Raises:
        UserError: if there was no original release.
    """
    entries = original_entries(config)
    if entries is None:
        raise UserError(f"no other form of the family {config.family} is written")
    _check_positions(config)
    _, more = cosmos.projection_to_diffusers(text_projection)
    write_safetensors(out / "model.safetensors", to_theirs(tensors, entries).with_others(more))


def _check_positions(config: NetworkConfig) -> None:
    """Raises UserError for rotary positions that only we support, and other programs would misread."""
    if set(getattr(config, "rope_interpolation", ())) - {1}:
        raise UserError(f"model.rope_interpolation={list(config.rope_interpolation)} is not supported by other forms")
