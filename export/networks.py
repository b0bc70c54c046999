"""The networks of a bundle as modules with only tensor inputs, which exporters can trace."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.export.quantize import FORMATS, round_linears
from megadit.infer.runtimes.network_spec import DENOISERS, TOWERS
from megadit.models.bundle import Bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.configs.unet import UNetConfig
from megadit.models.diffusion.parameterization import EDMDenoiser
from megadit.models.lora.inputs import AdapterInputLinears, AdapterInputs
from megadit.models.networks.conditioning import CleanLatents, Conditioning, conditioning_tokens
from megadit.models.packing.dense_layout import DenseLayout
from megadit.models.packing.segments import OpenRows
from megadit.models.storage.components import load_network
from megadit.models.tokenizers import VideoTokenizer
from megadit.models.tokenizers.tiling import Tiles

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PRECISIONS |= dict.fromkeys(FORMATS, torch.float16)
"""Precision of the denoiser -> dtype of its computation; products of its blocks use 8 bits instead (`quantize.py`)."""


class DenoiserGraph(nn.Module):
    """D(x; sigma): scalings in float32, patches and network in the chosen precision."""

    def __init__(self, denoiser: EDMDenoiser, slots: AdapterInputs | None = None) -> None:
        """`slots` are the adapter inputs (`AdapterInputs.inputs`), which come after the others."""
        super().__init__()
        self.denoiser = denoiser
        self.filled = nullcontext if slots is None else AdapterInputLinears(denoiser.dit, slots).filled

    def forward(self, x, sigma, text, text_length, fps, *more: Tensor) -> Tensor:
        guidance, adapters = self.split_guidance(more)
        with self.filled(adapters):
            return self.denoiser(x, sigma, Conditioning(text, text_length, fps, guidance_B=guidance))

    def split_guidance(self, more: Sequence[Tensor]) -> tuple[Tensor | None, Sequence[Tensor]]:
        """Split further inputs into the guidance scales [B] of a guidance-distilled network, which come first, and the
        rest."""
        return (None, more) if self.denoiser.dit.config.guidance_embedding_range is None else (more[0], more[1:])


class ConditionedDenoiserGraph(DenoiserGraph):
    """D(x; sigma) of a network with conditioning latents; further inputs are their mask, and the time of each frame.

    Extra conditioning frames follow those of the video, in `x` and in `x0`, where their values have no meaning.
    """

    def forward(self, x, sigma, text, text_length, fps, *more: Tensor) -> Tensor:
        guidance, (clean, is_clean, times, *adapters) = self.split_guidance(more)
        clean = CleanLatents(clean, is_clean.bool())
        conditioning = Conditioning(text, text_length, fps, clean=clean, guidance_B=guidance)
        with self.filled(adapters):
            return self.denoiser(x, sigma, conditioning, _open_layout(conditioning, times, self.denoiser.dit.config))


class ChannelDenoiserGraph(DenoiserGraph):
    """D(x; sigma) of a network with conditioning channels. Inputs are also the mask of pixel frames (M, T, H, W), and
    maybe image features."""

    def forward(self, x, sigma, text, text_length, fps, *more: Tensor) -> Tensor:
        guidance, (clean, is_clean, *more) = self.split_guidance(more)
        image, adapters = (None, more) if self.denoiser.dit.config.image_size is None else (more[0], more[1:])
        marks = is_clean.bool()
        clean = CleanLatents(clean, marks.any(0), marks_MTHW=marks)
        conditioning = Conditioning(text, text_length, fps, clean=clean, image_BIE=image, guidance_B=guidance)
        with self.filled(adapters):
            return self.denoiser(x, sigma, conditioning)


def _open_layout(conditioning: Conditioning, times_T: Tensor, config: DiTConfig) -> DenseLayout:
    """Layout of a batch with a conditioning mask and times as tensors: the rows of `DenseRows`, token by token."""
    clean, batch = conditioning.clean, conditioning.fps_B.shape[0]  # stays symbolic in export, unlike len
    is_clean_S = conditioning_tokens(clean.is_clean_THW, config)
    return DenseLayout(
        config.token_grid(*clean.size),
        conditioning.text_mask_BL,
        times_T.device,
        rows=OpenRows(torch.arange(batch) + batch * is_clean_S[:, None]),
        times=times_T[:: config.patch_temporal] / config.patch_temporal,
    )


class WholeTextDenoiserGraph(DenoiserGraph):
    """D(x; sigma) of an image network that attends to all text tokens, and maybe reads a pooled feature."""

    def forward(self, x, sigma, text, *more: Tensor) -> Tensor:
        pooled, adapters = (None, more) if self.denoiser.dit.config.pooled_size is None else (more[0], more[1:])
        unread_B = torch.zeros_like(sigma)
        conditioning = Conditioning(text, unread_B.long(), unread_B, pooled_BP=pooled)
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


class EncoderGraph(DecoderGraph):
    """Video to latents."""

    def forward(self, video: Tensor) -> Tensor:
        return self.tokenizer.encode(video)


class TowerGraph(nn.Module):
    """A tower of CLIP or a ViT: images, or token ids and their numbers, to unit vectors or logits."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, *inputs: Tensor) -> Tensor:
        return F.normalize(self.tower(*inputs).float(), dim=-1)


def network_of(tokenizer: VideoTokenizer) -> nn.Module | None:
    """The module inside a tokenizer, in float32, so that an exporter finds its weights; None for Haar."""
    network = getattr(tokenizer, "network", None)
    return None if network is None else nn.Module.float(network.module)  # diffusers' method warns of every cast


def in_float32(tokenizer: VideoTokenizer) -> VideoTokenizer:
    """The tokenizer for export: computing in float32, whatever its stored dtype."""
    return replace(tokenizer, dtype="float32") if hasattr(tokenizer, "dtype") else tokenizer


def _without_tiles(tokenizer: VideoTokenizer) -> VideoTokenizer:
    """The tokenizer with one tile larger than any video: a graph cannot have a variable number of tiles."""
    if not hasattr(tokenizer, "tiles"):
        return tokenizer
    return replace(in_float32(tokenizer), tiles=Tiles(side=2**30, overlap=0, frames=2**30, context=1))


def build_network(
    name: str, bundle: Bundle, tokenizer: VideoTokenizer, dtype: torch.dtype, slots: AdapterInputs | None = None
) -> nn.Module:
    """The module for the signature of this name; only denoisers compute in `dtype`, and have adapter inputs
    (`slots`)."""
    if name in DENOISERS:
        denoiser = EDMDenoiser(load_network(bundle.path / bundle.networks[DENOISERS.index(name)], dtype=dtype))
        denoiser.parameterization.scalings(torch.ones(1))  # fills cached tables, which tracing could not
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
    """The network with which its graph is compared, so that rounding does not hide differences.

    For bfloat16: its weights in float32, because ONNX Runtime has no bfloat16 products on CPUs; results are rounded by
    the runtime. For 8 bits: with the roundings of the graph, for these ranges.
    """
    if ranges:
        round_linears(network.denoiser.dit, ranges, precision)
    return network.float() if precision == "bf16" else network
