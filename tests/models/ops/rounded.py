"""Attention as its reference computes it, rounded where every kernel rounds: what the kernels' errors are held to.

The reference has float32 throughout. Matrix units multiply numbers of the inputs' precision: a kernel rounds the
probabilities P that it multiplies values by, and dS, what the scores' gradients are multiplied from, in which dP - D
partly cancels: where all keys count nearly alike its error is many times the reference's, whoever computes it. D is the
sum over the output that was rounded (arXiv 2205.14135, algorithm 4). torch's kernel for CPUs also adds the gradients of
keys and values up in that precision, 32 queries at a time.

Shapes: B batch, N heads, S queries, L keys, K head dim.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

QUERIES_AT_ONCE = 32


class _Rounded(torch.autograd.Function):
    """[B, N, S, K] in float64, of float64 q, k and v; `mask` is bool, and broadcasts to [B, N, S, L]."""

    @staticmethod
    def forward(ctx, q, k, v, mask, dtype):
        ctx.scale, ctx.dtype = q.shape[-1] ** -0.5, dtype
        P = (ctx.scale * q @ k.mT).masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
        out = _round(_round(P, dtype) @ v, dtype)
        ctx.save_for_backward(q, k, v, P, out)
        return out

    @staticmethod
    def backward(ctx, dO):
        q, k, v, P, out = ctx.saved_tensors
        D = (dO * out).sum(-1, keepdim=True)
        dS = _round(P * (dO @ v.mT - D), ctx.dtype)
        dq = _round(ctx.scale * dS @ k, ctx.dtype)
        return dq, _summed(ctx.scale * dS, q, ctx.dtype), _summed(_round(P, ctx.dtype), dO, ctx.dtype), None, None


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)


def _summed(a_BNSL: Tensor, b_BNSK: Tensor, dtype: torch.dtype) -> Tensor:
    """a^T b, [B, N, L, K]."""
    total = torch.zeros((), dtype=a_BNSL.dtype, device=a_BNSL.device)
    for a, b in zip(a_BNSL.split(QUERIES_AT_ONCE, 2), b_BNSK.split(QUERIES_AT_ONCE, 2), strict=True):
        total = _round(total + a.mT @ b, dtype)
    return total


def rounded(op: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """A function of the inputs of the op `attention` or `batch_attention`, in float64."""

    def of_batch(q, k, v, mask):
        return _Rounded.apply(
            q, k, v, torch.ones((), dtype=torch.bool, device=q.device) if mask is None else mask, dtype
        )

    def of_layout(q, k, v, layout, cross):
        mask = layout.attended(len(q), len(k), q.device, cross=cross)[:, None]
        out_BNSK = of_batch(*(rearrange(x, "S B N K -> B N S K") for x in (q, k, v)), mask)
        return rearrange(out_BNSK, "B N S K -> S B (N K)")

    return {"attention": of_layout, "batch_attention": of_batch}[op]
