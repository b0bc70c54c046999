"""Attention on a CPU by tiles of scores, with oneDNN's products.

torch's own kernel uses MKL for its products. Where MKL is slow (`is_mkl_slow`), the same attention in plain operations
takes about three quarters of the time, with one thread or two, for samples of some thousand tokens, forward and
backward; for short samples calls cost more, and for very long ones a tile exceeds the caches.

Shapes: B batch, N heads, S queries, L keys, K head dim, s queries of a tile.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier

import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.models.machine import multiplies
from megadit.models.ops.crossover import NEVER, Crossover
from megadit.models.ops.linear import SIZES, is_mkl_slow, onednn_product

TILE = 256
"""Queries whose scores are computed at once: they stay in a core's cache up to about a thousand keys."""
FEWEST, MOST_KEYS = 512, 8192
"""Minimum queries and keys, and maximum keys, for which it is faster: with more keys a tile exceeds the caches."""
MOST_THREADS = 2
"""Maximum threads for which it was measured."""


def _candidates(num_scores: int) -> tuple[Callable, Callable]:
    """Attention of one head of 64 by tiles and by torch."""
    q, k, v = torch.randn(3, 1, 1, math.isqrt(num_scores), 64)
    return lambda: TiledAttention.apply(q, k, v), lambda: F.scaled_dot_product_attention(q, k, v)


CROSSOVER = Crossover(
    "attention by tiles",
    tuple(tokens**2 for tokens in (512, 1024)) if SIZES else (),
    _candidates,
    lambda: FEWEST**2 if is_mkl_slow() else NEVER,
)
"""Number of scores of a head from which on tiles are faster than torch's own kernel."""


def suits_tiles(q_BNSK: Tensor, k_BNLK: Tensor) -> bool:
    return (
        q_BNSK.is_cpu
        and q_BNSK.dtype == k_BNLK.dtype
        and (q_BNSK.dtype == torch.float32 or q_BNSK.dtype == torch.bfloat16 and multiplies(torch.bfloat16))
        and min(q_BNSK.shape[2], k_BNLK.shape[2]) >= FEWEST
        and k_BNLK.shape[2] <= MOST_KEYS
        and torch.get_num_threads() <= MOST_THREADS
        and not torch.is_autocast_enabled("cpu")
        and q_BNSK.shape[2] * k_BNLK.shape[2] >= CROSSOVER.size
    )


class TiledAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(K)) v, [B, N, S, K]; scores and their gradients in float32, recomputed in backward."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        out = _like(q)

        def attend(b: int, n: int) -> None:
            v_KL = v[b, n].contiguous().t()
            for rows, p_sL in _probabilities(q[b, n], k[b, n]):
                out[b, n, rows] = onednn_product(p_sL.to(v.dtype), v_KL)

        _for_each_head(q, attend)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        grad_q, grad_k, grad_v = _like(q), _like(k), _like(v)

        def differentiate(b: int, n: int) -> None:
            grads = _backward_of_head(grad[b, n].contiguous(), q[b, n], k[b, n], v[b, n], grad_q[b, n])
            # cast, then transposed: both at once takes longer
            grad_k[b, n], grad_v[b, n] = (grad_KL.to(q.dtype).t() for grad_KL in grads)

        _for_each_head(q, differentiate)
        scale = q.shape[-1] ** -0.5
        return grad_q.mul_(scale), grad_k.mul_(scale), grad_v


def _backward_of_head(grad_SK: Tensor, q_SK: Tensor, k_LK: Tensor, v_LK: Tensor, grad_q_SK: Tensor) -> list[Tensor]:
    """Writes sqrt(K) times the gradient of q; returns that of k with the same factor, and that of v, [K, L] in
    float32."""
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
    """(rows of a tile, softmax of their scores in float32) for one head."""
    q_SK, k_LK = _wide(q_SK) * q_SK.shape[1] ** -0.5, _wide(k_LK)
    for start in range(0, len(q_SK), TILE):
        rows = slice(start, start + TILE)
        yield rows, onednn_product(q_SK[rows], k_LK).softmax(-1)


def _wide(x: Tensor) -> Tensor:
    return x.contiguous().float()  # both at once takes longer


def _for_each_head(x_BNSK: Tensor, compute: Callable[[int, int], None]) -> None:
    """compute(b, n) for all heads, each in one thread: products as small as a tile's gain little from several.

    What is computed does not depend on the number of threads.
    """
    heads = list(itertools.product(*map(range, x_BNSK.shape[:2])))
    threads, is_inference = torch.get_num_threads(), torch.is_inference_mode_enabled()

    def share(first: int) -> None:
        with torch.inference_mode(is_inference), torch.no_grad():  # each thread has modes of its own
            for head in heads[first::threads]:
                compute(*head)

    if threads == 1:
        share(0)
    else:
        list(_threads_of_one(threads).map(share, range(threads)))


@cache
def _threads_of_one(number: int) -> ThreadPoolExecutor:
    """A pool of threads in each of which torch uses that one alone."""
    all_there = Barrier(number + 1)

    def begin() -> None:
        torch.get_num_threads()  # else the first operation would take the process's number
        torch.set_num_threads(1)  # this thread's, and that of threads that begin after it
        all_there.wait()

    pool = ThreadPoolExecutor(number, "heads", begin)
    for _ in range(number):
        pool.submit(int)
    all_there.wait()
    torch.set_num_threads(number)
    return pool


os.register_at_fork(after_in_child=_threads_of_one.cache_clear)


def _like(x_BNSK: Tensor) -> Tensor:
    """An uninitialised tensor, heads contiguous for each token in memory, as its readers expect."""
    return torch.empty_like(x_BNSK.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
