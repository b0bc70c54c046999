"""The same adaptive norms as `modulation`, token by token: each looks its row up inside one compiled kernel (GPU).

A product with the segments' indicator matrix sums the gradients of rows: its order is fixed, where a scatter's is not.

Shapes: S video tokens, D width, G segments of a pack.
"""

from functools import lru_cache

import torch
from torch import Tensor

from megadit.models.fusion import fused
from megadit.models.segments import Run


@lru_cache(maxsize=8)
def row_of_token(runs: tuple[Run, ...], device: torch.device) -> Tensor:
    """int64 [S]: the segment of each token of `runs`, which follow one another."""
    segments = torch.tensor([segment for run in runs for segment in range(run.segment, run.segment + run.count)])
    lengths = torch.tensor([run.length for run in runs for _ in range(run.count)])
    return segments.repeat_interleave(lengths).to(device, non_blocking=True)


def modulated_norm_by_token(
    x_S1D: Tensor, shift_GD: Tensor, factor_GD: Tensor, eps: float, row_S: Tensor, is_rms: bool = False
) -> Tensor:
    """norm(x) * factor + shift, where token s has row `row_S[s]`; `is_rms` leaves the mean where it is."""
    return _ModulatedNorm.apply(x_S1D, shift_GD, factor_GD, eps, row_S, is_rms)


def gated_residual_by_token(x_S1D: Tensor, gate_GD: Tensor, y_S1D: Tensor, row_S: Tensor) -> Tensor:
    """x + gate * y, where token s has row `row_S[s]`."""
    return _GatedResidual.apply(x_S1D, gate_GD, y_S1D, row_S)


def _sum_rows(x_S1D: Tensor, row_S: Tensor, num_rows: int) -> Tensor:
    """Sums the tokens of each row, [G, D]."""
    is_of_row_GS = torch.arange(num_rows, device=row_S.device)[:, None] == row_S
    return is_of_row_GS.to(x_S1D.dtype) @ x_S1D[:, 0]


def _norm_forward(x, shift, factor, eps, row_S, is_rms):
    """The result, and the mean and 1 / root of each token in float32."""
    wide = x.float()
    mean = torch.zeros_like(wide[..., :1]) if is_rms else wide.mean(-1, keepdim=True)
    root_inverse = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    y = (wide - mean) * root_inverse * factor.float()[row_S, None] + shift.float()[row_S, None]
    return y.to(x.dtype), mean, root_inverse


def _norm_backward(grad, x, factor, mean, root_inverse, row_S, is_rms):
    """Gradients of x, shift and factor."""
    y = (x.float() - mean) * root_inverse
    grad_y = grad.float() * factor.float()[row_S, None]
    grad_x = grad_y - y * (grad_y * y).mean(-1, keepdim=True)
    if not is_rms:
        grad_x = grad_x - grad_y.mean(-1, keepdim=True)
    grad_factor = _sum_rows((grad.float() * y).to(x.dtype), row_S, len(factor))
    grad_shift = _sum_rows(grad, row_S, len(factor))
    return (grad_x * root_inverse).to(x.dtype), grad_shift.to(factor.dtype), grad_factor.to(factor.dtype)


def _residual_forward(x, gate, y, row_S):
    return x + gate[row_S, None] * y


def _residual_backward(grad, gate, y, row_S):
    """Gradients of gate and y."""
    return _sum_rows(grad * y, row_S, len(gate)).to(gate.dtype), grad * gate[row_S, None]


class _ModulatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shift, factor, eps, row_S, is_rms):
        y, mean, root_inverse = fused(_norm_forward, x, shift, factor, eps, row_S, is_rms)
        ctx.save_for_backward(x, factor, mean, root_inverse, row_S)
        ctx.is_rms = is_rms
        return y

    @staticmethod
    def backward(ctx, grad):
        gradients = fused(_norm_backward, grad.contiguous(), *ctx.saved_tensors, ctx.is_rms)
        return *gradients, None, None, None


class _GatedResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, y, row_S):
        ctx.save_for_backward(gate, y, row_S)
        return fused(_residual_forward, x, gate, y, row_S)

    @staticmethod
    def backward(ctx, grad):
        grad_gate, grad_y = fused(_residual_backward, grad.contiguous(), *ctx.saved_tensors)
        return grad, grad_gate, grad_y, None
