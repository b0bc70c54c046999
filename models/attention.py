"""Self- and cross-attention over dense batches and packs, and the kernels they choose from.

Shapes: S video tokens, L text tokens, B batch, D width, N heads, K head dim, G groups of heads, c segments of a run,
s tokens of each, l their longest text.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from megadit.models.config import DiTConfig
from megadit.models.dense_kernel import dense_kernel
from megadit.models.embeddings import Rotary
from megadit.models.qk_norm import QKNorm
from megadit.models.recompute import through
from megadit.models.segments import DenseLayout, Layout, SegmentLayout

if TYPE_CHECKING:
    from megadit.models.layers import LayerKit


Projection = Callable[[Tensor], Tensor]
PackedKernel = Callable[[Tensor, Tensor, Tensor, SegmentLayout, bool, Projection], Tensor]


class SelfAttention(nn.Module):
    """Every video token attends to all tokens of its own sample.

    Heads are grouped by the keys and values they share: the rows of the fused projection are
    (groups, [q ... q k v], K), so that any run of them is whole groups. Kernels see keys and values repeated.
    """

    def __init__(self, config: DiTConfig, layers: "LayerKit") -> None:
        super().__init__()
        self.layers = layers
        self.head_dim = config.dim_per_head
        width, size, bias = config.hidden_size, config.attention_size, config.structure.linear_bias
        self.per_group = config.num_attention_heads // config.key_heads
        rows = size + 2 * config.key_heads * self.head_dim
        self.qkv = layers.column_linear(width, rows, sequence="sharded", bias=bias)
        self.proj = layers.row_linear(size, width, bias=bias)
        self.q_layernorm, self.k_layernorm = QKNorm(config), QKNorm(config)

    def forward(self, x_SBD: Tensor, layout: Layout, rotary: Rotary | None) -> Tensor:
        grouped = rearrange(self.qkv(x_SBD), "S B (G j K) -> S B G j K", j=self.per_group + 2, K=self.head_dim)
        q, k, v = grouped.split([self.per_group, 1, 1], dim=-2)
        q, k, v = q.flatten(2, 3), k.squeeze(-2), v.squeeze(-2)
        q, k = self.q_layernorm(q, rotary), self.k_layernorm(k, rotary)
        if self.per_group > 1:
            k, v = (repeat(x, "S B G K -> S B (G n) K", n=self.per_group) for x in (k, v))
        return self.layers.attend(q, k, v, layout, cross=False, into=self.proj)


class CrossAttention(nn.Module):
    """Every video token attends to the text of its own sample, laid out head by head: (N, [k v], K)."""

    def __init__(self, config: DiTConfig, layers: "LayerKit") -> None:
        super().__init__()
        self.layers = layers
        self.head_dim = config.dim_per_head
        self.q = layers.column_linear(config.hidden_size, config.attention_size, sequence="sharded")
        self.kv = layers.column_linear(config.text_size, 2 * config.attention_size, sequence="replicated")
        self.proj = layers.row_linear(config.attention_size, config.hidden_size)
        self.q_layernorm, self.k_layernorm = QKNorm(config), QKNorm(config)

    def forward(self, x_SBD: Tensor, text_LBD: Tensor, layout: Layout) -> Tensor:
        q = self.q_layernorm(rearrange(self.q(x_SBD), "S B (N K) -> S B N K", K=self.head_dim))
        k, v = layout.constant(self, lambda: self._keys_and_values(text_LBD))
        return self.layers.attend(q, k, v, layout, cross=True, into=self.proj)

    def _keys_and_values(self, text_LBD: Tensor) -> tuple[Tensor, Tensor]:
        k, v = rearrange(self.kv(text_LBD), "L B (N kv K) -> kv L B N K", kv=2, K=self.head_dim)
        return self.k_layernorm(k), v


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, cross: bool, into: Projection) -> Tensor:
    """into(softmax(q k^T / sqrt(K)) v), each sample on its own.

    Args:
        q: [S, B, N, K]; B is 1 for a pack.
        k: [S, B, N, K], or [L, B, N, K] with `cross`.
        v: of k's shape.
        layout: which tokens form a sample, and which text belongs to it.
        cross: attend to text rather than to video tokens; a sample without text has the null token's slot.
        into: what reads the heads side by side, [S, B, N*K]; those of a pack's padding hold no meaning.
    """
    if isinstance(layout, DenseLayout):
        return into(_attend_dense(q, k, v, layout, cross))
    return packed_kernel(q)(q, k, v, layout, cross, into)


_DENSE = {
    "sample": ("S B N K", "B N S K"),
    "time": ("(T H W) B N K", "(B H W) N T K"),
    "space": ("(T H W) B N K", "(B T) N (H W) K"),
}
"""`DenseLayout.over` -> the order of a dense batch, and that in which its kernel takes it."""


def _attend_dense(q: Tensor, k: Tensor, v: Tensor, layout: DenseLayout, cross: bool) -> Tensor:
    order, by_kernel = _DENSE["sample" if cross else layout.over]
    sizes = {axis: size for axis, size in zip("THW", layout.grid, strict=True) if axis in order}
    mask = layout.text_mask_BL[:, None, None] if cross else None
    q, k, v = (rearrange(x, f"{order} -> {by_kernel}", **sizes) for x in (q, k, v))
    return rearrange(dense_kernel(q, k, v, mask), f"{by_kernel} -> {order}", **sizes).flatten(2)


def attend_runs(q: Tensor, k: Tensor, v: Tensor, layout: SegmentLayout, cross: bool, into: Projection) -> Tensor:
    """One dense attention per run of equally long segments; runs anywhere, costs what the segments cost."""
    shapes = [(run.count, run.length) for run in layout.runs]
    if cross:
        keys = _texts_of_runs(k, v, layout)
    else:
        keys = zip(_cut(k.squeeze(1), shapes), _cut(v.squeeze(1), shapes), [None] * len(shapes), strict=True)
    outputs = []
    for run, q_csNK, keys_of_run in zip(layout.runs, _cut(q.squeeze(1), shapes), keys, strict=True):
        outputs.append(torch.zeros_like(q_csNK).flatten(0, 1) if run.is_padding else _attend_run(q_csNK, *keys_of_run))
    return through(_join_runs, *outputs, into=into)


def _join_runs(*outputs: Tensor) -> Tensor:
    """One sequence from the tokens of all runs, heads side by side: [S, 1, N*K]."""
    return rearrange(torch.cat(outputs), "S N K -> S 1 (N K)")


def _attend_run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (rearrange(x, "c s N K -> c N s K") for x in (q, k, v))
    return rearrange(dense_kernel(q, k, v, mask), "c N s K -> (c s) N K")


def _cut(x_SNK: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The sequence as uniform batches, one a run: [c, s, N, K] for each (c, s) of `shapes`.

    All are cut at once: the gradient of a slice is as long as the sequence, that of all pieces together no longer.
    """
    parts = x_SNK.split([count * length for count, length in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


def _texts_of_runs(k: Tensor, v: Tensor, layout: SegmentLayout) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Keys and values of each run's text, [c, l, N, K], and a mask [c, 1, 1, l] of what is there (None: all of it)."""

    def compute() -> tuple[Tensor, list[torch.Size], list[Tensor | None]]:
        slots, are_valid = zip(*map(layout.text_of_run, layout.runs), strict=True)
        masks = [None if valid.all() else valid[:, None, None].to(k.device, non_blocking=True) for valid in are_valid]
        flat = torch.cat([slots_cl.flatten() for slots_cl in slots]).to(k.device, non_blocking=True)
        return flat, [slots_cl.shape for slots_cl in slots], masks

    slots, shapes, masks = layout.cached(("texts", k.device), compute)
    return list(zip(_cut(k[slots, 0], shapes), _cut(v[slots, 0], shapes), masks, strict=True))


def attend_varlen(q: Tensor, k: Tensor, v: Tensor, layout: SegmentLayout, cross: bool, into: Projection) -> Tensor:
    """All segments in one flash-attention call (half precision on a GPU); padding attends to itself."""
    from torch.nn.attention.varlen import varlen_attn

    bounds_q, longest_q = layout.bounds(q.device, of_text=False)
    bounds_k, longest_k = layout.bounds(q.device, of_text=cross)
    out_SNK = varlen_attn(q[:, 0], k[:, 0], v[:, 0], bounds_q, bounds_k, longest_q, longest_k)
    return into(rearrange(out_SNK, "S N K -> S 1 (N K)"))


@cache
def has_varlen_attention() -> bool:
    """Whether torch has a kernel for packs that runs on this GPU."""
    # torch 2.10 added it; flash attention wants half precision, heads of 8 n <= 256 and an Ampere GPU or newer
    return find_spec("torch.nn.attention.varlen") is not None and torch.cuda.get_device_capability() >= (8, 0)


def packed_kernel(q: Tensor) -> PackedKernel:
    """The kernel for packs of this device, precision and head width."""
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    fits_flash = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    if q.is_cuda and is_half and fits_flash and has_varlen_attention():
        return attend_varlen
    return attend_runs
