"""Variants of `batch_attention`: torch's fused kernel unless another is faster.

Shapes: B batch, N heads, S queries, L keys, K head dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.models.ops.reference import batch_attention
from megadit.models.ops.tiled_attention import TiledAttention, suits_tiles

_matmul = torch.backends.mkldnn.matmul


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
