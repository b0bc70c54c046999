"""`megadit generate --dry-run`: the device memory of a generation, computed from sizes before anything is loaded.

A generation has three phases in sequence: text encoding, sampling, decoding. The weights of the network and the
autoencoder stay on the device through all of them; so do those of the text encoder unless it is offloaded.
Activations are the tensors alive at once in the largest step of each phase (rounded up).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from megadit.infer.pipeline.batches import batch_size
from megadit.infer.runtimes.load import autoguidance_bundle
from megadit.infer.runtimes.options import RuntimeOptions
from megadit.infer.runtimes.torch import CACHE_BYTES
from megadit.infer.sampling.resolve import latent_size
from megadit.models.bundle import Bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.configs.unet import UNetConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.lora.inputs import AdapterInputs
from megadit.models.networks.blocks import MLP_SLICE
from megadit.models.shared.errors import UserError
from megadit.models.shared.resources import memory_in_words
from megadit.models.storage.components import TENSOR_FILE, network_shapes
from megadit.models.storage.wrapped import open_tensor_file
from megadit.models.text_encoders.base import PublishedTextEncoder
from megadit.models.text_encoders.published import DTYPES
from megadit.models.tokenizers import VideoTokenizer

LIVE_WIDTHS = 10
"""Tensors as large as a block's tokens that are alive at once: input, norm, q, k, v fused and split, the result."""
SAMPLER_STATES = 6
"""float64 latents that are alive at once: x, its noise, and the history of multistep solvers."""
LIVE_FEATURES = 4
"""Tensors as large as the decoder's widest that are alive at once."""
TEXT_TOKENS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """Options of a generation that decide its memory, in addition to its size."""

    dtype: torch.dtype
    running: RuntimeOptions = RuntimeOptions()
    batch_size: int | None = None
    num_videos: int | None = None
    """Videos of the request: no batch is larger; None: any number."""
    slots: AdapterInputs | None = None
    """Adapter inputs of an exported network: they take memory with and without adapters."""

    @property
    def flags(self) -> str:
        """Memory-saving options as flags of `megadit generate`."""
        running = self.running
        kept = "" if running.resident_blocks is None else f"--resident_blocks {running.resident_blocks}"
        is_sequential = not running.batch_guidance
        named = {"--offload_text_encoder": running.offload_text_encoder, "--sequential_guidance": is_sequential}
        return " ".join(filter(None, [*(name for name, is_on in named.items() if is_on), kept]))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes on the device, and in the host's memory for offloaded blocks."""

    network: int
    autoencoder: int
    text_encoder: int | None
    """Weights; None if its files are not on this machine."""
    keeps_text_encoder: bool
    sampling: int
    """Activations."""
    decoding: int
    host: int

    @property
    def phases(self) -> dict[str, int]:
        """Bytes of each phase, its weights included."""
        text_encoder = self.text_encoder or 0
        weights = self.network + self.autoencoder
        kept = text_encoder if self.keeps_text_encoder else 0
        return {
            "encoding": weights + text_encoder,
            "sampling": weights + kept + self.sampling,
            "decoding": weights + kept + self.decoding,
        }

    @property
    def peak(self) -> int:
        return max(self.phases.values())


def plan_memory(
    bundle: Bundle, settings: SamplingSettings, tokenizer: VideoTokenizer, text_encoder: Any, choices: Choices
) -> MemoryPlan:
    """The memory of one batch of videos of these settings.

    Raises:
        UserError: for a size that cannot be made.
    """
    bundles = [bundle, *([autoguidance_bundle(settings.autoguidance, bundle)] if settings.autoguidance else [])]
    networks = [_network_bytes(each.config, choices) for each in bundles for _ in each.networks]
    return MemoryPlan(
        network=sum(here for here, _ in networks),
        autoencoder=_file_bytes(bundle.path / "tokenizer"),
        text_encoder=_text_encoder_bytes(bundle, text_encoder),
        keeps_text_encoder=not choices.running.offload_text_encoder,
        sampling=_sampling_bytes(bundle.config, settings, tokenizer, choices),
        decoding=_decoding_bytes(settings, tokenizer),
        host=sum(host for _, host in networks),
    )


def fitting(
    bundle: Bundle,
    settings: SamplingSettings,
    tokenizer: VideoTokenizer,
    text_encoder: Any,
    choices: Choices,
    free: int,
) -> Choices | None:
    """The fastest choices that fit in `free` bytes; None where none do."""
    for offload, in_turn in ((False, False), (True, False), (True, True)):
        kept = {
            "offload_text_encoder": offload or choices.running.offload_text_encoder,
            "batch_guidance": choices.running.batch_guidance and not in_turn,
        }
        is_last = in_turn
        numbers = [None, *(range(num_blocks(bundle.config) - 2, 0, -1) if is_last else ())]
        for resident in numbers:
            tried = replace(choices, running=replace(choices.running, resident_blocks=resident, **kept))
            if plan_memory(bundle, settings, tokenizer, text_encoder, tried).peak <= free:
                return tried
    return None


def describe_plan(plan: MemoryPlan, free: int, fits: Choices | None) -> str:
    """The plan in lines, with choices that fit in `free` bytes."""
    text = "not on this machine" if plan.text_encoder is None else memory_in_words(plan.text_encoder)
    leaves = "" if plan.keeps_text_encoder else ", only while the text is encoded"
    fetched = f" (all blocks, {memory_in_words(plan.host)}, in the host's memory)" if plan.host else ""
    lines = [
        f"network       {memory_in_words(plan.network)}{fetched}",
        f"text encoder  {text}{leaves}",
        f"autoencoder   {memory_in_words(plan.autoencoder)}",
        *(f"{name:<13} {memory_in_words(size)} in all" for name, size in plan.phases.items()),
        f"largest       {memory_in_words(plan.peak)} of {memory_in_words(free)}",
    ]
    if plan.peak > free:
        lines.append(f"too much: use {fits.flags}" if fits is not None else "too much: make the video smaller")
    return "\n".join(lines)


def num_blocks(config: NetworkConfig) -> int:
    """Number of blocks that can be offloaded."""
    return config.num_layers if isinstance(config, DiTConfig) else 0


def _network_bytes(config: NetworkConfig, choices: Choices) -> tuple[int, int]:
    """Bytes of a network's weights on the device, and in the host's memory."""
    blocks, around = (choices.dtype.itemsize * numbers for numbers in _network_numbers(config))
    resident, count = choices.running.resident_blocks, num_blocks(config)
    if resident is None or resident + 1 >= count:
        return blocks + around, 0
    return blocks * (resident + 1) // count + around, blocks


@cache  # the same for all choices
def _network_numbers(config: NetworkConfig) -> tuple[int, int]:
    """Numbers in the blocks, and in the other weights."""
    shapes = network_shapes(config)
    blocks = sum(prod(shape) for name, shape in shapes.items() if name.startswith("blocks."))
    return blocks, sum(map(prod, shapes.values())) - blocks


def _rows(settings: SamplingSettings, config: NetworkConfig) -> int:
    """Batch rows of one video in one call of the network: one for each condition, and one for the unconditional pass,
    unless another network computes that (`guidance.in_one_batch`), or the network is guidance-distilled."""
    if config.guidance_embedding_range is not None:
        return 1
    num_passes, total = 1 + bool(settings.second_prompt), settings.guidance + settings.second_guidance
    return num_passes if total == 1 or settings.autoguidance else num_passes + 1


def _sampling_bytes(
    config: NetworkConfig, settings: SamplingSettings, tokenizer: VideoTokenizer, choices: Choices
) -> int:
    """Bytes of the network's activations and the sampler's state; extra conditioning frames are not counted."""
    shape = latent_size(settings, config, tokenizer)[1]
    videos = batch_size(choices.batch_size, config.num_tokens(*shape[1:]))
    videos = videos if choices.num_videos is None else min(videos, choices.num_videos)
    state = 8 * SAMPLER_STATES * prod(shape) * videos
    numbers = 0 if choices.slots is None else sum(map(prod, choices.slots.inputs.values()))
    sets = 2 if settings.adapter_interval else 1  # adapters at the noise levels within, zeros at the others
    rows = videos * (_rows(settings, config) if choices.running.batch_guidance else 1)
    activations = _ACTIVATIONS[type(config)](config, shape, rows, choices.dtype.itemsize)
    return activations + state + 4 * rows * sets * numbers


def _activations_of_dit(config: DiTConfig, shape: tuple[int, ...], rows: int, size: int) -> int:
    tokens = prod(config.token_grid(*shape[1:]))
    block = LIVE_WIDTHS * tokens * rows * config.hidden_size
    mlp = 2 * min(tokens, MLP_SLICE) * rows * config.mlp_rows
    kept = size * 2 * config.num_layers * TEXT_TOKENS * rows * config.attention_size
    patches = 4 * 4 * tokens * rows * config.token_dim
    return size * (block + mlp) + min(kept, CACHE_BYTES) + patches


def _activations_of_unet(config: UNetConfig, shape: tuple[int, ...], rows: int, size: int) -> int:
    """Activations of the finest level, and the skip connections of all levels."""
    latents, layers = prod(shape[1:]), config.settings["layers_per_block"]
    of_levels = [width * latents / 4**level for level, width in enumerate(config.widths)]
    skipped = sum((1 + (layers if isinstance(layers, int) else max(layers))) * numbers for numbers in of_levels)
    return int(size * rows * (LIVE_WIDTHS * max(of_levels) + skipped))


_ACTIVATIONS: dict[type, Callable[[Any, tuple[int, ...], int, int], int]] = {
    DiTConfig: _activations_of_dit,
    UNetConfig: _activations_of_unet,
}
"""Configuration class -> function of (config, latent shape CTHW, batch rows, bytes of a number) that gives the bytes
of its activations."""


def _decoding_bytes(settings: SamplingSettings, tokenizer: VideoTokenizer) -> int:
    """Bytes of the decoder's widest features for one tile at full size, and of the video itself."""
    frames = tokenizer.frames_covering(settings.num_frames)
    video = 4 * 3 * frames * settings.height * settings.width
    network = getattr(tokenizer, "network", None)
    if network is None:
        return 2 * video
    tiles, config = tokenizer.tiles, network.config
    side = min(tiles.side * tokenizer.spatial_compression, max(settings.height, settings.width))
    at_once = min(tiles.frames * tokenizer.temporal_compression, frames)
    width = config.get("decoder_base_dim") or config.get("base_dim")
    width = width or min(config.get("decode_block_out_channels") or config.get("block_out_channels") or (128,))
    return 2 * video + 4 * LIVE_FEATURES * at_once * side**2 * width


def _file_bytes(directory: Path) -> int:
    path = directory / TENSOR_FILE
    return path.stat().st_size if path.is_file() else 0


def _text_encoder_bytes(bundle: Bundle, text_encoder: Any) -> int | None:
    in_bundle = _file_bytes(bundle.path / "text_encoder")
    if not isinstance(text_encoder, PublishedTextEncoder):
        return in_bundle
    try:
        places = text_encoder.directories
        files = [
            file for place in places for file in (sorted(place.glob("*.safetensors")) if place.is_dir() else [place])
        ]
    except UserError:
        return None
    numbers = sum(prod(stored.shape) for file in files for stored in open_tensor_file(file).stored.values())
    return in_bundle + numbers * DTYPES[text_encoder.dtype].itemsize or None
