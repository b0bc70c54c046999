"""Variants of `linear`: on CPUs by oneDNN, in inference fused with GELU; for experts with one matrix each.

torch uses MKL for float32 products, which reaches less than half of oneDNN's rate on some processors (AMD's with
AVX-512) and about the same on others. Measurements: train/LOG.md.

Shapes: I and O input and output features, N tokens sorted by their experts, E experts.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.models.machine import processor
from megadit.models.ops.crossover import NEVER, Crossover
from megadit.models.ops.reference import linear

FEWEST_ROWS = 4
"""Minimum number of tokens for oneDNN: with fewer, a product is limited by reading its matrix, in MKL as well."""
FEWEST_MULTIPLICATIONS = 2**21
"""Minimum number of multiplications for oneDNN by the rule: smaller products take less time than its call."""
_BY_ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
"""The oneDNN op of torch's compiler on CPUs: (x, weight, bias, activation, its scalars, its algorithm)."""
SIZES = () if _BY_ONEDNN is None else tuple(2**power for power in (21, 23, 25, 27, 28))
"""Numbers of multiplications at which products are timed."""


# --- oneDNN -------------------------------------------------------------------------------------------------------


def _suits_onednn(x: Tensor, weight: Tensor, crossover: Crossover) -> bool:
    """Whether oneDNN suits: half-precision products use oneDNN anyway, and torch raises for unsupported inputs."""
    return (
        x.is_cpu
        and x.numel() * weight.shape[0] >= crossover.size  # first: checks cost time in small networks
        and x.dtype == weight.dtype == torch.float32
        and x.shape[-1] == weight.shape[-1]
        and (weight.is_contiguous() or weight.t().is_contiguous())  # oneDNN is slow for others
        and x.numel() >= FEWEST_ROWS * x.shape[-1]
        and torch.backends.mkldnn.matmul.fp32_precision != "bf16"  # torch then uses oneDNN anyway
        and not torch.is_autocast_enabled("cpu")
    )


def _suits_inference(x, weight, bias=None, gelu=None, counts_E=None) -> bool:
    crossover = PRODUCT if gelu is None else WITH_GELU
    return counts_E is None and not torch.is_grad_enabled() and _suits_onednn(x, weight, crossover)


def _suits_training(x, weight, bias=None, gelu=None, counts_E=None) -> bool:
    is_plain = torch.is_grad_enabled() and gelu is None and counts_E is None
    return is_plain and _suits_onednn(x, weight, WITH_GRADIENTS)


@linear.variant("onednn", suits=_suits_inference)
def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: str | None = None, _=None) -> Tensor:
    """x [..., in] -> x W^T + b [..., out], or its GELU in the same pass, of any sizes; no gradients.

    W [out, in] is contiguous, or its transpose is.
    """
    return _BY_ONEDNN(x, weight, bias, "none" if gelu is None else "gelu", [], gelu or "")


@linear.variant("onednn_with_gradients", suits=_suits_training)
def _onednn_with_gradients(x, weight, bias=None, gelu=None, counts_E=None) -> Tensor:
    return _Linear.apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    """dx = dy W, dW = dy^T x, db = sum of dy: products like the first, with second derivatives."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return onednn_product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = None if weight is None else linear(grad, weight.t())
        grad_NO = grad.view(-1, grad.shape[-1])
        grad_weight = None if x is None else _transposed_product(grad_NO, x.reshape(-1, x.shape[-1]).contiguous())
        grad_bias = grad_NO.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


def _transposed_product(a_NO: Tensor, b_NI: Tensor) -> Tensor:
    """a^T b, [O, I]."""
    (rows, width), other = a_NO.shape, b_NI.shape[1]
    # the first operand is copied in its new order, the other way round the second one and the result; for wide results
    # the kernel itself is slower that way
    if rows * width <= 2 * (rows * other + width * other):
        return linear(a_NO.t(), b_NI.t())
    return linear(b_NI.t(), a_NO.t()).t().contiguous()


@cache
def is_mkl_slow() -> bool:
    """MKL uses AVX-512 only on Intel's processors; there, oneDNN's copies for the backward outweigh its gain."""
    if _BY_ONEDNN is None:
        return False  # MKL is as fast
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and "Intel" not in processor()


def _products(multiplications: int, gelu: str | None = None) -> tuple[Callable, Callable]:
    """A product of a network of width 512, or an MLP's first, by oneDNN and by torch."""
    width, out = 512, 512 if gelu is None else 2048
    x, weight, bias = torch.randn(multiplications // (width * out), width), torch.randn(out, width), torch.randn(out)
    return lambda: onednn_product(x, weight, bias, gelu), lambda: linear.reference.compute(x, weight, bias, gelu)


def _products_with_gradients(multiplications: int) -> tuple[Callable, Callable]:
    width = 512
    x, weight, bias = torch.randn(multiplications // width**2, width), torch.randn(width, width), torch.randn(width)

    @torch.enable_grad()
    def run(product: Callable) -> None:
        leaves = [part.requires_grad_() for part in (x, weight, bias)]
        out = product(*leaves)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    return lambda: run(_Linear.apply), lambda: run(F.linear)


def _rule() -> float:
    return FEWEST_MULTIPLICATIONS if _BY_ONEDNN is not None else NEVER


PRODUCT = Crossover("products by oneDNN", SIZES, _products, _rule)
WITH_GELU = Crossover("products with GELU by oneDNN", SIZES, lambda size: _products(size, "tanh"), _rule)
WITH_GRADIENTS = Crossover(
    "products with gradients by oneDNN",
    SIZES,
    _products_with_gradients,
    lambda: FEWEST_MULTIPLICATIONS if is_mkl_slow() else NEVER,
)
"""Numbers of multiplications from which on oneDNN is faster than torch's own product."""


# --- experts ------------------------------------------------------------------------------------------------------


def _suits_grouped_product(x, weight, bias=None, gelu=None, counts_E=None) -> bool:
    return counts_E is not None and x.is_cuda and x.dtype == torch.bfloat16


@linear.variant("grouped_product", suits=_suits_grouped_product)
def _grouped_product(x_NI, weight_EOI, bias=None, gelu=None, counts_E=None) -> Tensor:
    ends_E = counts_E.to(x_NI.device).cumsum(0).int()
    return F.grouped_mm(x_NI, weight_EOI.transpose(1, 2), offs=ends_E)


@linear.variant("expert_by_expert", suits=lambda x, weight, bias=None, gelu=None, counts_E=None: counts_E is not None)
def _expert_by_expert(x_NI, weight_EOI, bias=None, gelu=None, counts_E=None) -> Tensor:
    """Like the reference, with the variant that suits each expert's product."""
    parts = zip(x_NI.split(counts_E.tolist()), weight_EOI.unbind(), strict=True)
    return torch.cat([linear(x_nI, weight_OI) for x_nI, weight_OI in parts])
