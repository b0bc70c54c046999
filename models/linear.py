"""Linear layers on a CPU: float32 products by oneDNN, when sampling with the activation behind them in the same pass.

torch leaves float32 products to MKL, which reaches less than half of oneDNN's rate on some processors (AMD's with
AVX-512) and about the same on others. Figures: train/LOG.md.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.machine import processor

FEWEST_ROWS = 4
"""With fewer tokens a product only reads its matrix, which MKL does as well."""
FEWEST_MULTIPLICATIONS = 2**21
"""Smaller products take less time than it takes to ask oneDNN for them."""
_BY_ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
"""What torch's own compiler calls on CPUs: (x, weight, bias, activation, its numbers, its form)."""


class Linear(nn.Linear):
    """x W^T + b, as `torch.nn.Linear` has it."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, as `F.linear` has it, by the faster library; the same shapes give the same bits each time."""
    if not _suits_onednn(x, weight):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return onednn_product(x, weight, bias)
    return _Linear.apply(x, weight, bias) if is_mkl_slow() else F.linear(x, weight, bias)


def linear_gelu(layer: nn.Module, x: Tensor, approximate: str) -> Tensor | None:
    """GELU(layer(x)) in one pass; None where that is not to be had. `approximate`: as in `F.gelu`."""
    is_watched = layer._forward_pre_hooks or layer._forward_hooks  # and must be called, and give its own output
    if type(layer) is Linear and not is_watched and not torch.is_grad_enabled() and _suits_onednn(x, layer.weight):
        return _BY_ONEDNN(x, layer.weight, layer.bias, "gelu", [], approximate)
    return None


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b by oneDNN, whatever their sizes; no gradients. W is contiguous, or its transpose is."""
    return _BY_ONEDNN(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """dx = dy W, dW = dy^T x, db = sum of dy: products like the first, of which second gradients can be taken too."""

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
    # the first operand is copied in its new order, which takes longer than the product's own preparations
    if rows * width <= rows * other + width * other:
        return linear(a_NO.t(), b_NI.t())
    return linear(b_NI.t(), a_NO.t()).t().contiguous()


def _suits_onednn(x: Tensor, weight: Tensor) -> bool:
    """A compiler chooses by itself, half precision is oneDNN's anyway, and torch complains of what does not fit."""
    return (
        not torch.compiler.is_compiling()
        and x.is_cpu
        and x.dtype == weight.dtype == torch.float32
        and x.shape[-1] == weight.shape[-1]
        and (weight.is_contiguous() or weight.t().is_contiguous())  # others oneDNN multiplies number by number
        and _BY_ONEDNN is not None
        and x.numel() >= FEWEST_ROWS * x.shape[-1]
        and x.numel() * len(weight) >= FEWEST_MULTIPLICATIONS
        and torch.backends.mkldnn.matmul.fp32_precision != "bf16"  # torch takes oneDNN's reduced products by itself
        and not torch.is_autocast_enabled("cpu")
    )


@cache
def is_mkl_slow() -> bool:
    """MKL knows AVX-512 on Intel's processors alone; on those, oneDNN's copies for the backward win nothing back."""
    if _BY_ONEDNN is None:
        return False  # by comparison
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and "Intel" not in processor()
