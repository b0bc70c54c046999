"""The networks of a bundle as modules of tensors alone, which is what an exporter can trace."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.export.quantize import round_linears
from megadit.infer.runtimes.network_spec import DENOISERS, TOWERS
from megadit.models.bundle import Bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.configs.unet import UNetConfig
from megadit.models.diffusion.denoiser import EDMDenoiser
from megadit.models.lora.inputs import AdapterInputs, SlottedLinears
from megadit.models.networks.conditioning import CleanLatents, Conditioning, conditioning_tokens
from megadit.models.packing.dense_layout import DenseLayout
from megadit.models.packing.segments import OpenRows
from megadit.models.storage.weights import load_network
from megadit.models.tokenizers import VideoTokenizer
from megadit.models.tokenizers.tiling import Tiles

PRECISIONS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.float16,
    "fp8": torch.float16,
}
"""Precision of the denoiser -> dtype it computes in; products of its blocks use 8 bits instead (`quantize.py`)."""


class DenoiserGraph(nn.Module):
    """D(x; sigma): preconditioning in float32, patches and the network in its own precision."""

    def __init__(self, denoiser: EDMDenoiser, slots: AdapterInputs | None = None) -> None:
        """`slots` are for adapters, whose inputs (`AdapterInputs.inputs`) then come after the others."""
        super().__init__()
        self.denoiser = denoiser
        self.filled = nullcontext if slots is None else SlottedLinears(denoiser.dit, slots).filled

    def forward(self, x, sigma, text, text_length, fps, *more: Tensor) -> Tensor:
        guidance, adapters = self.split_guidance(more)
        with self.filled(adapters):
            return self.denoiser(x, sigma, Conditioning(text, text_length, fps, guidance_B=guidance))

    def split_guidance(self, more: Sequence[Tensor]) -> tuple[Tensor | None, Sequence[Tensor]]:
        """Split further inputs into the guidance scales [B] of a guidance-distilled network, which come first, and the
        others."""
        return (None, more) if self.denoiser.dit.config.guidance_embedding_range is None else (more[0], more[1:])


class ConditionedDenoiserGraph(DenoiserGraph):
    """D(x; sigma) of a network with conditioning latents: their mask, and the time of each frame, are inputs.

    Extra conditioning frames come after those of the video, in `x` and `x0` too, where they have no meaning.
    """

    def forward(self, x, sigma, text, text_length, fps, *more: Tensor) -> Tensor:
        guidance, (clean, is_clean, times, *adapters) = self.split_guidance(more)
        clean = CleanLatents(clean, is_clean.bool())
        conditioning = Conditioning(text, text_length, fps, clean=clean, guidance_B=guidance)
        with self.filled(adapters):
            return self.denoiser(x, sigma, conditioning, _open_layout(conditioning, times, self.denoiser.dit.config))


class ChannelDenoiserGraph(DenoiserGraph):
    """The same of a network that reads what is given beside its latents, which of the frames of each latent are given
    (M, T, H, W), and maybe features of images."""

    def forward(self, x, sigma, text, text_length, fps, *more: Tensor) -> Tensor:
        guidance, (clean, is_clean, *more) = self.split_guidance(more)
        count = 0 if self.denoiser.dit.config.image_size is None else 1
        image, adapters = more[:count], more[count:]
        marks = is_clean.bool()
        conditioning = Conditioning(
            text,
            text_length,
            fps,
            clean=CleanLatents(clean, marks.any(0), marks_MTHW=marks),
            image_BIE=next(iter(image), None),
            guidance_B=guidance,
        )
        with self.filled(adapters):
            return self.denoiser(x, sigma, conditioning)


def _open_layout(conditioning: Conditioning, times_T: Tensor, config: DiTConfig) -> DenseLayout:
    """Layout of a batch whose conditioning mask and times are tensors: the rows of `DenseRows`, token by token."""
    clean, batch = conditioning.clean, conditioning.fps_B.shape[0]  # a number that stays open, as len does not
    is_clean_S = conditioning_tokens(clean.is_clean_THW, config)
    return DenseLayout(
        config.token_grid(*clean.size),
        conditioning.text_mask_BL,
        times_T.device,
        rows=OpenRows(torch.arange(batch) + batch * is_clean_S[:, None]),
        times=times_T[:: config.patch_temporal] / config.patch_temporal,
    )


class WholeTextDenoiserGraph(DenoiserGraph):
    """The same of a network of images that reads all rows of its texts, and maybe one feature of each whole text."""

    def forward(self, x, sigma, text, *more: Tensor) -> Tensor:
        count = 0 if self.denoiser.dit.config.pooled_size is None else 1
        pooled, adapters = more[:count], more[count:]
        unread_B = torch.zeros_like(sigma)
        conditioning = Conditioning(text, unread_B.long(), unread_B, pooled_BP=next(iter(pooled), None))
        with self.filled(adapters):
            return self.denoiser(x, sigma, conditioning)


class DecoderGraph(nn.Module):
    """Latents to video."""

    def __init__(self, tokenizer: VideoTokenizer) -> None:
        super().__init__()
        self.network = network_of(tokenizer)
        self.tokenizer = _without_tiles(tokenizer)

    def forward(self, latents: Tensor) -> Tensor:
        return self.tokenizer.decode(latents)


class EncoderGraph(nn.Module):
    """Video to latents."""

    def __init__(self, tokenizer: VideoTokenizer) -> None:
        super().__init__()
        self.network = network_of(tokenizer)
        self.tokenizer = _without_tiles(tokenizer)

    def forward(self, video: Tensor) -> Tensor:
        return self.tokenizer.encode(video)


class TowerGraph(nn.Module):
    """Pictures, or tokens and their numbers, to unit vectors."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, *inputs: Tensor) -> Tensor:
        return F.normalize(self.tower(*inputs).float(), dim=-1)


def network_of(tokenizer: VideoTokenizer) -> nn.Module | None:
    """The module inside a tokenizer, in float32, so that an exporter finds its weights; Haar has none."""
    network = getattr(tokenizer, "network", None)
    return None if network is None else nn.Module.float(network.module)  # diffusers' own warns of every cast


def in_float32(tokenizer: VideoTokenizer) -> VideoTokenizer:
    """The tokenizer as it is exported: computing in float32, whatever its weights are stored in."""
    return replace(tokenizer, dtype="float32") if hasattr(tokenizer, "dtype") else tokenizer


def _without_tiles(tokenizer: VideoTokenizer) -> VideoTokenizer:
    """The tokenizer with one tile that no video exceeds: a graph has no fixed number of them."""
    if not hasattr(tokenizer, "tiles"):
        return tokenizer
    return replace(in_float32(tokenizer), tiles=Tiles(side=2**30, overlap=0, frames=2**30, context=1))


def build_network(
    name: str, bundle: Bundle, tokenizer: VideoTokenizer, dtype: torch.dtype, slots: AdapterInputs | None = None
) -> nn.Module:
    """The module behind a contract of this name; only denoisers compute in `dtype`, and have `slots`."""
    if name in DENOISERS:
        denoiser = EDMDenoiser(load_network(bundle.path / bundle.networks[DENOISERS.index(name)], dtype=dtype))
        denoiser.parameterization.scalings(torch.ones(1))  # before tracing, which could not make the cached tables
        network = _DENOISER_GRAPHS[type(bundle.config)](bundle)(denoiser, slots)
    elif name == "classifier":
        network = bundle.load_classifier(dtype=dtype)
    elif name in TOWERS:
        network = TowerGraph(getattr(bundle.load_clip(dtype=dtype), name))
    elif name == "text_encoder":
        network = bundle.load_text_encoder().graph()
    else:
        network = {"video_decoder": DecoderGraph, "video_encoder": EncoderGraph}[name](tokenizer)
    return network.eval().requires_grad_(False)


def _graph_of_transformer(bundle: Bundle) -> type[DenoiserGraph]:
    if not bundle.config.conditioning.is_among:
        return ChannelDenoiserGraph
    return ConditionedDenoiserGraph if bundle.conditionings else DenoiserGraph


_DENOISER_GRAPHS: dict[type, Callable[[Bundle], type[DenoiserGraph]]] = {
    DiTConfig: _graph_of_transformer,
    UNetConfig: lambda bundle: WholeTextDenoiserGraph,
}


def comparable(network: nn.Module, precision: str, ranges: Mapping[str, float] | None = None) -> nn.Module:
    """The network as its graph is compared, so that every layer is compared in full and rounding hides nothing.

    Of bfloat16: its weights, in float32, as CPUs have no bfloat16 products in ONNX Runtime; the rounding of results is
    the runtime's own. Of 8 bits: with the roundings of the graph, for these ranges.
    """
    if ranges:
        round_linears(network.denoiser.dit, ranges, precision)
    return network.float() if precision == "bf16" else network
