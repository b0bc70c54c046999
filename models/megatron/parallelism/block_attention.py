"""Attention to a block of keys, and its backward, for ring attention.

The forward returns out = softmax(q k^T / sqrt(K)) v over these keys and lse, the logarithm of its denominator. The
backward reads out and lse over all keys, which determine the probabilities of these: exp(q k^T / sqrt(K) - lse). The
kernels are those of torch's scaled_dot_product_attention, called by name because they return lse.

Shapes: c segments, s queries or keys of each, N heads, K head dim.
"""

import math

import torch
from einops import rearrange
from torch import Tensor

from megadit.models.ops.attention import switch_to_flash_attention_3

_aten = torch.ops.aten


def attend_block(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out [c, s, N, K] and lse [c, s, N] (float32) of attention: q [c, s, N, K] to keys k and values v [c, l, M, K]."""
    q, k, v = (rearrange(x, "c s N K -> c N s K") for x in (q, k, v))
    out, lse = _kernel(q)[0](q, k, v)
    return rearrange(out, "c N s K -> c s N K"), rearrange(lse, "c N s -> c s N")


def attend_block_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q (its contribution from these keys) [c, s, N, K], k and v [c, l, M, K].

    `grad` and `out` [c, s, N, K] and `lse` [c, s, N] are those of all keys.
    """
    grad, q, out, k, v = (rearrange(x, "c s N K -> c N s K") for x in (grad, q, out, k, v))
    lse = rearrange(lse, "c s N -> c N s").contiguous()
    grads = _kernel(q)[1](grad, q, k, v, out, lse)
    return tuple(rearrange(x, "c N s K -> c s N K") for x in grads)


def attend_block_tangent(
    q: Tensor, q_tangent: Tensor, lse: Tensor, k: Tensor, v: Tensor, k_tangent: Tensor, v_tangent: Tensor
) -> tuple[Tensor, Tensor]:
    """sum of P (dS v + dv) [c, s, N, K] and of P dS [c, s, N] over these keys, float32.

    The tangent of attention is the sum of the first over all keys, minus out times the sum of the second.

    Tangents q_tangent, k_tangent and v_tangent have the shapes of q [c, s, N, K], k [c, s, N, K] and v [c, s, N, K];
    `lse` [c, s, N] is that of all keys.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    q, dq, k, v, dk, dv = (
        rearrange(x.float(), "c s N K -> c N s K") for x in (q, q_tangent, k, v, k_tangent, v_tangent)
    )
    P = (q @ k.mT * scale - rearrange(lse, "c s N -> c N s 1")).exp()
    P_dS = P * (dq @ k.mT + q @ dk.mT) * scale
    return rearrange(P_dS @ v + P @ dv, "c N s K -> c s N K"), rearrange(P_dS.sum(-1), "c N s -> c s N")


def _kernel(q: Tensor):
    if not q.is_cuda:
        return _cpu_forward, _cpu_backward
    if q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        switch_to_flash_attention_3()
        return _flash_forward, _flash_backward
    return plain_forward, plain_backward


def _cpu_forward(q, k, v):
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)


def _cpu_backward(grad, q, k, v, out, lse):
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, False)


def _flash_forward(q, k, v):
    return _aten._scaled_dot_product_flash_attention(q, k, v)[:2]


def _flash_backward(grad, q, k, v, out, lse):
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # random state of dropout, which is 0
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, False, unused, unused[:0]
    )


def plain_forward(q, k, v):
    """Reference with all scores in memory: used for float32 on GPUs, and in tests of the kernels."""
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.float()).to(q.dtype), lse


def plain_backward(grad, q, k, v, out, lse):
    q, k, v, grad, out = (x.float() for x in (q, k, v, grad, out))
    scale = 1 / math.sqrt(q.shape[-1])
    P = (q @ k.mT * scale - lse[..., None]).exp()
    # dS = P (dP - sum(dO O)), arXiv 2205.14135, appendix B.2
    dS = P * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return dS @ k, dS.mT @ q, P.mT @ grad
