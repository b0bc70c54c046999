"""Attention over a uniform batch: torch's fused kernel.

Shapes: B batch, N heads, S queries, L keys, K head dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.models.tiled_attention import TiledAttention, suits_tiles

_matmul = torch.backends.mkldnn.matmul


def dense_kernel(q_BNSK: Tensor, k_BNLK: Tensor, v_BNLK: Tensor, mask_B11L: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(K)) v, [B, N, S, K]; `mask_B11L` is True where a key may be attended."""
    # a compiler cannot look at settings of torch; compiled networks are those of sampling, which leaves them alone
    if q_BNSK.is_cpu and not torch.compiler.is_compiling():
        if _matmul.fp32_precision == "bf16":
            if q_BNSK.dtype == torch.float32:
                bias = None if mask_B11L is None else _as_bias(mask_B11L, q_BNSK.shape[2])
                return _FullPrecision.apply(q_BNSK, k_BNLK, v_BNLK, bias)
        elif mask_B11L is None and suits_tiles(q_BNSK, k_BNLK):
            return TiledAttention.apply(q_BNSK, k_BNLK, v_BNLK)
    return F.scaled_dot_product_attention(q_BNSK, k_BNLK, v_BNLK, attn_mask=mask_B11L)


def _as_bias(mask_B11L: Tensor, num_queries: int) -> Tensor:
    """0 and -inf to add to the scores, [B, 1, S, L]."""
    bias_B11L = torch.zeros(mask_B11L.shape).masked_fill_(~mask_B11L, float("-inf"))
    return bias_B11L.expand(-1, -1, num_queries, -1)


class _FullPrecision(torch.autograd.Function):
    """torch's flash attention for CPUs, with float32 products whatever `train.matmul_precision` says.

    With less, oneDNN prepares each of the kernel's small products anew: for short samples that takes eight times as
    long as the attention itself, where large products win a factor of two.
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
