"""Writes a bundle (`bundle.py`), whole or not at all, of components that fit each other."""

import os
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadit.models.bundle import COMPONENTS, FORMAT_VERSION, LOW_NOISE, NOTICES
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_directory, check_replaceable, read_json, write_manifest
from megadit.models.shared.words import write_words
from megadit.models.storage import components as parts
from megadit.models.storage.license import License
from megadit.models.storage.tensor_source import TensorSource
from megadit.models.text_encoders import TextEncoder
from megadit.models.text_encoders.image_encoder import ImageEncoder
from megadit.models.tokenizers import VideoTokenizer


def write_bundle(
    out: str | os.PathLike,
    *,
    config: NetworkConfig,
    state_dict: Mapping[str, Tensor] | TensorSource,
    tokenizer: VideoTokenizer,
    text_encoder: TextEncoder,
    defaults: SamplingSettings,
    training: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    license: License | None = None,
    image_encoder: ImageEncoder | None = None,
    low_noise: TensorSource | None = None,
    boundary: float | None = None,
    words: Iterable[str] | None = None,
) -> None:
    """Writes a bundle, whole or not at all; one already at `out` is replaced.

    `training` says where the weights come from (recipe, step, EMA profile, samples consumed); `dtype` converts them;
    `license` is that of published weights, whose files are copied. `low_noise` are the weights of a low-noise expert
    with this configuration, for the noise levels t = sigma / (1 + sigma) below `boundary`; `words` is the vocabulary of
    the training captions.

    Raises:
        UserError: if the components do not fit each other, or if `out` is a directory that holds something else.
    """
    out = Path(out)
    check_replaceable(out)
    _check_components_fit(config, tokenizer, text_encoder, defaults)
    if (found := None if image_encoder is None else image_encoder.dim) != config.image_size:
        raise UserError(f"model.image_size={config.image_size} does not fit the image encoder, of width {found}")
    with atomic_directory(out) as directory:
        parts.save_network(directory / "transformer", config, state_dict, dtype)
        if low_noise is not None:
            parts.save_network(directory / LOW_NOISE, config, low_noise, dtype)
        tokenizer.save(directory / "tokenizer")
        text_encoder.save(directory / "text_encoder")
        if image_encoder is not None:
            image_encoder.save(directory / "image_encoder")
        if words is not None:
            write_words(directory, words)
        if license is not None:
            license.copy_files(directory / NOTICES)
        manifest = {
            "format_version": FORMAT_VERSION,
            "megadit_version": metadata.version("megadit"),
            "components": {name: read_json(directory / name / parts.CONFIG_FILE)["type"] for name in COMPONENTS},
            "fingerprints": {"tokenizer": tokenizer.fingerprint(), "text_encoder": text_encoder.fingerprint()},
            "defaults": defaults.to_dict(),
            "training": training,
            "license": None if license is None else license.to_dict(),
            **({} if low_noise is None else {"boundary": boundary}),
        }
        write_manifest(directory, manifest)


def _check_components_fit(
    config: NetworkConfig, tokenizer: VideoTokenizer, text_encoder: TextEncoder, defaults: SamplingSettings
) -> None:
    for setting, ours, theirs, part in (
        ("in_channels", config.in_channels, tokenizer.latent_channels, "tokenizer's latents"),
        ("sigma_data", config.sigma_data, tokenizer.sigma_data, "tokenizer's latents"),
        ("crossattn_emb_size", config.crossattn_emb_size, text_encoder.dim, "text encoder's features"),
    ):
        if ours != theirs:
            raise UserError(f"model.{setting}={ours} does not fit the {part}: {theirs}")
    if config.pooled_size not in (None, text_encoder.pooled_dim):
        raise UserError(
            f"the network reads a pooled feature of width {config.pooled_size}, and the text encoder's is "
            f"{text_encoder.pooled_dim}"
        )
    frames = tokenizer.frames_covering(defaults.num_frames)
    config.sample_grid(*tokenizer.latent_shape(frames, defaults.height, defaults.width)[1:])
