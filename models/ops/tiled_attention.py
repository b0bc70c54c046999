"""Attention on a CPU by tiles of scores, whose products are oneDNN's.

torch's own kernel leaves its products to MKL. Where that is slow (`is_mkl_slow`) the same attention, written out, takes
about three quarters of the time of one thread for samples of some thousand tokens, forward and backward; for short ones
a call a tile costs more, and for very long ones a tile is too large.

Shapes: B batch, N heads, S queries, L keys, K head dim, s queries of a tile.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from megadit.models.machine import multiplies
from megadit.models.ops.linear import is_mkl_slow, onednn_product

TILE = 256
"""Queries whose scores are computed at once: those stay in a core's cache up to about a thousand keys."""
FEWEST, MOST_KEYS = 512, 8192
"""Queries, and keys, from which on it pays; keys up to which it does: with more a tile leaves every cache."""


def suits_tiles(q_BNSK: Tensor, k_BNLK: Tensor) -> bool:
    return (
        q_BNSK.is_cpu
        and q_BNSK.dtype == k_BNLK.dtype
        and (q_BNSK.dtype == torch.float32 or q_BNSK.dtype == torch.bfloat16 and multiplies(torch.bfloat16))
        and min(q_BNSK.shape[2], k_BNLK.shape[2]) >= FEWEST
        and k_BNLK.shape[2] <= MOST_KEYS
        and torch.get_num_threads() == 1  # torch's kernel gives each thread its own heads; here they would share a tile
        and not torch.is_autocast_enabled("cpu")
        and is_mkl_slow()
    )


class TiledAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(K)) v, [B, N, S, K]; scores and their gradients in float32, computed again in backward."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        out = _like(q)
        for b, n in _heads(q):
            v_KL = v[b, n].contiguous().t()
            for rows, p_sL in _probabilities(q[b, n], k[b, n]):
                out[b, n, rows] = onednn_product(p_sL.to(v.dtype), v_KL)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        grad_q, grad_k, grad_v = _like(q), _like(k), _like(v)
        for b, n in _heads(q):
            grads = _backward_of_head(grad[b, n].contiguous(), q[b, n], k[b, n], v[b, n], grad_q[b, n])
            # cast, then turned: both at once takes longer
            grad_k[b, n], grad_v[b, n] = (grad_KL.to(q.dtype).t() for grad_KL in grads)
        scale = q.shape[-1] ** -0.5
        return grad_q.mul_(scale), grad_k.mul_(scale), grad_v


def _backward_of_head(grad_SK: Tensor, q_SK: Tensor, k_LK: Tensor, v_LK: Tensor, grad_q_SK: Tensor) -> list[Tensor]:
    """Fills sqrt(K) times the gradient of q; gives so much of that of k, and that of v, [K, L] in float32."""
    dtype, q_SK = q_SK.dtype, q_SK.contiguous()
    k_KL, v_wide_LK, grad_wide_SK = k_LK.contiguous().t(), _wide(v_LK), _wide(grad_SK)
    totals = [torch.zeros(k_KL.shape), torch.zeros(k_KL.shape)]
    for rows, p_sL in _probabilities(q_SK, k_LK):
        grad_p_sL = onednn_product(grad_wide_SK[rows], v_wide_LK)
        grad_score_sL = torch.ops.aten._softmax_backward_data(grad_p_sL, p_sL, -1, torch.float32).to(dtype)
        grad_q_SK[rows] = onednn_product(grad_score_sL, k_KL)
        totals[0].add_(onednn_product(q_SK[rows].t(), grad_score_sL.t()))
        totals[1].add_(onednn_product(grad_SK[rows].t(), p_sL.to(dtype).t()))
    return totals


def _probabilities(q_SK: Tensor, k_LK: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows of a tile, their softmax of scores in float32) for one head."""
    q_SK, k_LK = _wide(q_SK) * q_SK.shape[1] ** -0.5, _wide(k_LK)
    for start in range(0, len(q_SK), TILE):
        rows = slice(start, start + TILE)
        yield rows, onednn_product(q_SK[rows], k_LK).softmax(-1)


def _wide(x: Tensor) -> Tensor:
    return x.contiguous().float()  # both at once takes longer


def _heads(x_BNSK: Tensor) -> Iterator[tuple[int, int]]:
    return itertools.product(range(x_BNSK.shape[0]), range(x_BNSK.shape[1]))


def _like(x_BNSK: Tensor) -> Tensor:
    """Uninitialised, heads side by side in memory, as whatever reads it has them."""
    return torch.empty_like(x_BNSK.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
