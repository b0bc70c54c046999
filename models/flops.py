"""Floating-point operations of a network and of its training.

Counted are the multiplications and additions (two operations) of matrix products: all linears of the network,
once for each video token, text token or sample that they read (only chosen experts); self-attention, whose cost
is the square of each sample's tokens (or, along one axis, its tokens times those of a line); cross-attention, its
tokens times its text. Padding, norms and activations are not counted. The backward takes twice the forward; where only
an adapter is trained, the backward of the network's linears costs as much as their forward, for gradients of inputs.
"""

from functools import lru_cache
from math import prod

from megadit.models.configs.adapter import AdapterConfig
from megadit.models.configs.config import DiTConfig
from megadit.models.lora.adapters import chosen_targets
from megadit.models.networks.registry import in_tower
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.models.storage.components import network_shapes

_TABLES = ("positions.", "class_embedder.", "x_embedder.positions", "x_embedder.words")
"""Parameters whose rows are looked up, not multiplied."""
_OF_CONDITION = (
    *("sigma_embedder.", "fps_embedder.", "guidance_embedder.", "shared_embedder.", "shared_modulation.", "head."),
)
"""Prefixes of matrices that read the conditioning of a sample, or its class token."""


def training_flops(
    layout: PackLayout, model: DiTConfig, adapter: AdapterConfig | None = None, forwards: float = 0
) -> int:
    """Floating-point operations of forward and backward for the samples of a pack, plus `forwards` further forward
    passes.

    With `adapter`, only the adapter is trained.
    """
    segments = [segment for segment in layout.segments if not segment.is_padding]
    forward = sum(forward_flops(segment, model) for segment in segments)
    extra = round(forwards * forward)
    if adapter is None:
        return 3 * forward + extra
    attention = sum(attention_flops(segment, model) for segment in segments)
    of_adapter = 3 * sum(adapter_flops(segment, model, adapter) for segment in segments)
    return 2 * forward + attention + of_adapter + extra


def adapter_flops(segment: Segment, model: DiTConfig, adapter: AdapterConfig) -> int:
    """Floating-point operations that an adapter adds to the forward pass of one sample."""
    sizes = _adapter_readers(model, adapter)
    return 2 * sum(rows * sizes[reader] for reader, rows in _rows(segment).items())


def forward_flops(segment: Segment, model: DiTConfig) -> int:
    """Floating-point operations of the forward pass of one sample."""
    sizes = _readers(model)
    linears = 2 * sum(rows * sizes[reader] for reader, rows in _rows(segment).items())
    return linears + _expert_flops(segment.num_tokens, model) + attention_flops(segment, model)


def attention_flops(segment: Segment, model: DiTConfig) -> int:
    """Floating-point operations of softmax(q k^T) v in all layers: over a sample's tokens, its axes and its text."""
    keys = segment.num_tokens
    if model.structure.block == "st_dit":
        frames, height, width = segment.grid
        keys += frames + height * width
    if model.structure.cross_attention:
        keys += segment.text_places
    text = model.text_tower
    of_text = 4 * segment.text_places**2 * text.hidden_size * text.num_layers
    return 4 * segment.num_tokens * keys * model.attention_size * model.num_layers + of_text


def _rows(segment: Segment) -> dict[str, int]:
    """How often a sample is multiplied with the matrices of each group."""
    return {"token": segment.num_tokens, "word": segment.text_places, "sample": 1}


@lru_cache(maxsize=64)
def _readers(model: DiTConfig) -> dict[str, int]:
    """Number of elements of the matrices that read every video token, every text token or every sample."""
    sizes = {"token": 0, "word": 0, "sample": 0}
    for name, shape in network_shapes(model).items():
        if len(shape) == 2 and not in_tower(name).startswith(_TABLES):
            sizes[_reader(name)] += prod(shape)
    return sizes


@lru_cache(maxsize=64)
def _adapter_readers(model: DiTConfig, adapter: AdapterConfig) -> dict[str, int]:
    """The same for an adapter, as products with its two matrices, [R, I] and [O, R]."""
    shapes, sizes = network_shapes(model), {"token": 0, "word": 0, "sample": 0}
    for target in chosen_targets(model, adapter.targets).values():
        sizes[_reader(f"{target.linear}.weight")] += adapter.rank * sum(shapes[f"{target.linear}.weight"])
    return sizes


def _reader(name: str) -> str:
    if ".modulation." in name or in_tower(name).startswith(_OF_CONDITION):
        return "sample"
    is_of_text = name.startswith(("text_embedder.", "text_tower.")) or ".cross_attention.kv." in name
    return "word" if is_of_text else "token"


def _expert_flops(num_tokens: int, model: DiTConfig) -> int:
    """Floating-point operations of the chosen experts, in all layers."""
    experts = model.experts
    chosen = experts.top_k * num_tokens
    if experts.routing == "expert_choice" and experts.num_experts:
        chosen = experts.num_experts * experts.capacity(num_tokens)
    one_expert = (model.mlp_factors + 1) * model.expert_size * model.hidden_size
    return 2 * chosen * one_expert * model.num_layers if experts.num_experts else 0
