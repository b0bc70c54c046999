"""Variants of `qk_norm_rope`.

Shapes: S tokens, B batch, N heads, K head dim.
"""

import torch
from torch import Tensor

from megadit.models.ops.fusion import fused, is_compiled
from megadit.models.ops.reference import qk_norm_rope


def _learns(x, weight, *_) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))


@qk_norm_rope.variant("saves_input", suits=_learns)
def _saves_input(x, weight, cos, sin, eps) -> Tensor:
    return _NormRotate.apply(x, weight, cos, sin, eps)


@qk_norm_rope.variant("one_pass", suits=lambda *inputs: not _learns(*inputs), traceable=True)
def _one_pass(x, weight, cos, sin, eps) -> Tensor:
    return _fused_norm_rotate(x, weight, cos, sin, eps)[0]


def _fused_norm_rotate(x, weight, cos, sin, eps):
    y, rms_inverse = fused(_norm_rotate, _rows(x, cos), weight, _rows_of(cos, x), _rows_of(sin, x), eps)
    return _shaped(y, x), rms_inverse


def _rows(x: Tensor, cos: Tensor | None) -> Tensor:
    """Flatten x for a compiled kernel to [rows, 1, N, K], without rotation [rows, 1, 1, K]: one form for any batch.

    Uncompiled, x is unchanged, [S, B, N, K]; a view except for grouped heads.
    """
    return x.reshape(-1, 1, *(x.shape[2:] if cos is not None else (1, x.shape[-1]))) if is_compiled(x) else x


def _shaped(rows: Tensor, x: Tensor) -> Tensor:
    return rows.view(x.shape) if is_compiled(x) else rows


def _rows_of(table: Tensor | None, x: Tensor) -> Tensor | None:
    """Rotary table of each row of `_rows`, from [S, 1 or B, 1, K]."""
    if table is None or not is_compiled(x):
        return table
    return table.expand(-1, x.shape[1], -1, -1).reshape(-1, 1, 1, table.shape[-1])


def _norm_rotate(x, weight, cos, sin, eps):
    """The result, and 1 / rms(x) (None without normalisation).

    Half precision is converted to float32 once and rounded once: mixed-precision operations take several times as long
    on a CPU, and the mean of squares would overflow.
    """
    y, rms_inverse = _wide(x), None
    if weight is not None:
        rms_inverse = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        y = y * rms_inverse * _wide(weight)
    return _rotate(y, cos, sin).to(x.dtype), rms_inverse


def _wide(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x if x.dtype == wide else x.contiguous().to(wide)  # both at once takes several times as long


def _rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    if cos is None:
        return x
    return torch.addcmul(x * cos.to(x.dtype), x.roll(x.shape[-1] // 2, dims=-1), sin.to(x.dtype))


def _norm_rotate_backward(grad, x, weight, cos, sin, rms_inverse):
    """Gradients of x and weight."""
    grad = _rotate(_wide(grad), cos, None if sin is None else -sin)
    if weight is None:
        return grad.to(x.dtype), None
    normed = _wide(x) * rms_inverse
    product = grad * normed
    grad_weight = product.sum((0, 1, 2)).to(weight.dtype)
    # d(x / rms) = (g - y mean(g y)) / rms, y = x / rms, g = grad * weight
    projection = _weighted_sums(product, _wide(weight)) / x.shape[-1]
    grad_x = (grad * _wide(weight)).addcmul_(normed, projection, value=-1).mul_(rms_inverse)
    return grad_x.to(x.dtype), grad_weight


def _weighted_sums(product: Tensor, weight_K: Tensor) -> Tensor:
    """product @ weight, [..., 1]; compiled as a sum, which needs no products in memory."""
    if torch.compiler.is_compiling():
        return (product * weight_K).sum(-1, keepdim=True)
    return (product @ weight_K)[..., None]


class _NormRotate(torch.autograd.Function):
    """Saves its input, which the fused projection holds anyway, instead of five intermediate values."""

    @staticmethod
    def forward(ctx, x, weight, cos, sin, eps):
        y, rms_inverse = _fused_norm_rotate(x, weight, cos, sin, eps)
        ctx.save_for_backward(x, weight, cos, sin, rms_inverse)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight, cos, sin, rms_inverse = ctx.saved_tensors
        turn = _rows_of(cos, x), _rows_of(sin, x)
        inputs = _rows(grad, cos), _rows(x, cos), weight, *turn, rms_inverse
        grad_x, grad_weight = fused(_norm_rotate_backward, *inputs)
        return _shaped(grad_x, x), grad_weight, None, None, None
