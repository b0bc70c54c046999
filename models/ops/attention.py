"""Variants of `attention`, within each sample of a dense batch or of a pack, and of `batch_attention`: torch's fused
kernel unless another is faster.

Shapes: S video tokens, L keys (video or text tokens), B batch, N heads, K head dim, c segments of a length group, s
tokens of each, l their longest text.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.attention import SDPBackend

from megadit.models.ops.ledger import cheap
from megadit.models.ops.reference import attention, batch_attention
from megadit.models.ops.tiled_attention import TiledAttention, suits_tiles
from megadit.models.packing.dense_layout import DenseLayout
from megadit.models.packing.layout import Layout
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import up_to_each

_matmul = torch.backends.mkldnn.matmul
_DENSE = {
    "sample": ("S B N K", "B N S K"),
    "before": ("S B N K", "B N S K"),
    "time": ("(T H W) B N K", "(B H W) N T K"),
    "space": ("(T H W) B N K", "(B T) N (H W) K"),
}
"""`DenseLayout.over` -> the layout of a dense batch, and that for its kernel."""


@attention.variant("dense", suits=lambda q, k, v, layout, cross: isinstance(layout, DenseLayout), traceable=True)
def attend_dense(q: Tensor, k: Tensor, v: Tensor, layout: DenseLayout, cross: bool) -> Tensor:
    """One dense attention of a batch, [S, B, N*K]: q [S, B, N, K], k and v [L, B, M, K]."""
    order, by_kernel = _DENSE["sample" if cross else layout.over]
    sizes = {axis: size for axis, size in zip("THW", layout.grid, strict=True) if axis in order}
    mask = layout.text_mask_BL[:, None, None] if cross else None
    if layout.is_causal and not cross:
        mask = up_to_each(q.shape[0], q.device)[None, None]
    q, k, v = (rearrange(x, f"{order} -> {by_kernel}", **sizes) for x in (q, k, v))
    return rearrange(batch_attention(q, k, v, mask), f"{by_kernel} -> {order}", **sizes).flatten(2)


@cache
def has_varlen_attention() -> bool:
    """Whether torch has a kernel for packs that runs on this GPU."""
    # torch 2.10 added it; flash attention needs half precision, heads of 8 n <= 256 and an Ampere GPU or newer
    return find_spec("torch.nn.attention.varlen") is not None and torch.cuda.get_device_capability() >= (8, 0)


@cache
def switch_to_flash_attention_3() -> bool:
    """Switch all flash attention of this process to FlashAttention-3 (arXiv 2407.08608) where it can run: on a Hopper
    GPU, with its package and a torch that calls it (2.11). Return whether it does.
    """
    if find_spec("flash_attn_interface") is None or torch.cuda.get_device_capability() != (9, 0):
        return False
    if "FA3" not in getattr(torch.nn.attention, "list_flash_attention_impls", list)():
        return False
    torch.nn.attention.activate_flash_attention_impl("FA3")
    return True


FEWEST_TOKENS, MOST_GROUPS = 512, 4
"""Minimum tokens of the shortest sample, and maximum length groups, for cuDNN's attention to each group: at nearly
twice the rate of the varlen kernel on a Hopper GPU, it makes up for several launches (H100: 1.15 ms for eight samples
of 1,024 tokens against 1.98; 2.05 for nine of 256 to 2,048 in three groups against 2.21)."""


@cache
def _has_fast_dense_attention(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether torch uses cuDNN's kernel for dense attention with heads of this width.

    Torch is asked: which GPUs do (sm_90 and sm_100, but not sm_120) differs between its releases and those of cuDNN.
    """
    q = torch.empty(1, 1, FEWEST_TOKENS, width, dtype=dtype, device=device)
    return torch._fused_sdp_choice(q, q, q) == int(SDPBackend.CUDNN_ATTENTION)


def has_few_long_groups(layout: Layout) -> bool:
    """Whether dense attention to each length group is faster than the varlen kernel."""
    groups = [group for group in getattr(layout, "groups", None) or () if not group.is_padding]
    return 0 < len(groups) <= MOST_GROUPS and min(group.length for group in groups) >= FEWEST_TOKENS


def _suits_varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout, cross: bool) -> bool:
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] % 8 or q.shape[-1] > 256:
        return False
    if isinstance(layout, DenseLayout) or layout.is_causal:  # its argument for this differs between torch releases
        return False
    # cuDNN plans each new shape, which includes the longest caption of a group: nearly every pack has new ones
    if not has_varlen_attention():
        return False
    return cross or not (has_few_long_groups(layout) and _has_fast_dense_attention(q.device, q.dtype, q.shape[-1]))


@attention.variant("varlen_flash", suits=_suits_varlen)
def attend_varlen(q: Tensor, k: Tensor, v: Tensor, layout: PackLayout, cross: bool) -> Tensor:
    """All segments in one flash-attention call (half precision on a GPU); padding attends to itself.

    q [S, 1, N, K], k and v [L, 1, M, K] -> [S, 1, N*K].
    """
    from torch.nn.attention.varlen import varlen_attn

    switch_to_flash_attention_3()
    tensors = layout.on(q.device)
    bounds_k, longest_k = (tensors.text_bounds, layout.longest_text) if cross else (tensors.bounds, layout.longest)
    out_SNK = varlen_attn(q.squeeze(1), k.squeeze(1), v.squeeze(1), tensors.bounds, bounds_k, layout.longest, longest_k)
    return rearrange(out_SNK, "S N K -> S 1 (N K)")


@attention.variant("by_length_group", suits=lambda q, k, v, layout, cross: isinstance(layout, PackLayout))
def attend_by_length_group(q: Tensor, k: Tensor, v: Tensor, layout: PackLayout, cross: bool) -> Tensor:
    """One dense attention per group of equally long segments; runs on any device, without work for padding.

    q [S, 1, N, K], k and v [L, 1, M, K] -> [S, 1, N*K].
    """
    shapes = [(group.count, group.length) for group in layout.groups]
    if cross:
        keys = _texts_of_groups(k, v, layout)
    else:
        masks = [up_to_each(length, q.device)[None, None] if layout.is_causal else None for _, length in shapes]
        keys = zip(_cut(k.squeeze(1), shapes), _cut(v.squeeze(1), shapes), masks, strict=True)
    outputs = []
    for group, q_csNK, keys_of_group in zip(layout.groups, _cut(q.squeeze(1), shapes), keys, strict=True):
        is_padding = group.is_padding
        outputs.append(torch.zeros_like(q_csNK).flatten(0, 1) if is_padding else _attend_group(q_csNK, *keys_of_group))
    return _join(*outputs)


@cheap
def _join(*outputs: Tensor) -> Tensor:
    """One sequence from the tokens of all length groups, heads concatenated: [S, 1, N*K]."""
    if len(outputs) == 1:  # no copy
        return rearrange(outputs[0], "S N K -> S 1 (N K)")
    return rearrange(torch.cat(outputs), "S N K -> S 1 (N K)")


def _attend_group(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (rearrange(x, "c s N K -> c N s K") for x in (q, k, v))
    return rearrange(batch_attention(q, k, v, mask), "c N s K -> (c s) N K")


def _cut(x_SNK: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The sequence as uniform batches, one for each length group: [c, s, N, K] for each (c, s) of `shapes`.

    All are split at once: the gradient of a slice is as long as the sequence, and so is that of all splits together.
    The gradient of a single split would be a copy.
    """
    if len(shapes) == 1:
        return [x_SNK.unflatten(0, shapes[0])]
    parts = x_SNK.split([count * length for count, length in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


def _texts_of_groups(k: Tensor, v: Tensor, layout: PackLayout) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Keys and values of each group's text, [c, l, N, K], and a mask [c, 1, 1, l] of valid ones (None: all)."""
    slots, shapes, masks = layout.on(k.device).texts
    return list(zip(_cut(k[slots, 0], shapes), _cut(v[slots, 0], shapes), masks, strict=True))


def _needs_full_precision(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    return q.is_cpu and q.dtype == torch.float32 and _matmul.fp32_precision == "bf16"


@batch_attention.variant("float32_products", suits=_needs_full_precision)
def _float32_products_alone(q: Tensor, k: Tensor, v: Tensor, mask_B11L: Tensor | None) -> Tensor:
    return _FullPrecision.apply(q, k, v, None if mask_B11L is None else _as_bias(mask_B11L, q.shape[2]))


def _suits_tiles(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    return mask is None and suits_tiles(q, k) and _matmul.fp32_precision != "bf16"


@batch_attention.variant("tiled", suits=_suits_tiles)
def _tiled(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
    return TiledAttention.apply(q, k, v)


@batch_attention.variant("sdpa", suits=lambda *_: True, traceable=True)
def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask_B11L: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B11L)


def _as_bias(mask_B11L: Tensor, num_queries: int) -> Tensor:
    """The mask as 0 and -inf to add to the scores, [B, 1, S, L]."""
    bias_B11L = torch.zeros(mask_B11L.shape).masked_fill_(~mask_B11L, float("-inf"))
    return bias_B11L.expand(-1, -1, num_queries, -1)


class _FullPrecision(torch.autograd.Function):
    """torch's flash attention for CPUs, with float32 products whatever `train.matmul_precision` says.

    With reduced precision, oneDNN prepares each of the kernel's small products again: for short samples that takes
    eight times as long as the attention itself; only large products become faster, by a factor of two.
    """

    @staticmethod
    def forward(ctx, q, k, v, bias):
        with _float32_products():
            out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)
        ctx.save_for_backward(q, k, v, out, logsumexp, bias)
        return out

    @staticmethod
    def backward(ctx, grad):
        *saved, bias = ctx.saved_tensors
        with _float32_products():
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, *saved, 0.0, False, attn_mask=bias
            )
        return *grads, None


@contextmanager
def _float32_products() -> Iterator[None]:
    before, _matmul.fp32_precision = _matmul.fp32_precision, "ieee"
    try:
        yield
    finally:
        _matmul.fp32_precision = before
