"""Adaptive norms, applied per sample: each segment of a pack has its own shift, scale and gate.

The forward never gathers a row per token: a run of equally long segments is viewed as a batch and broadcast. The
backward reduces over each segment, in a fixed order, so that the same pack gives the same gradient to the last bit;
the normalised activations are recomputed rather than kept. On a GPU: `modulation_by_token`.

Shapes: S video tokens, B batch, D width, G segments of a pack, c segments of a run, s tokens of each.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.modulation_by_token import gated_residual_by_token, modulated_norm_by_token, row_of_token
from megadit.models.segments import Run

if TYPE_CHECKING:
    from megadit.models.layers import LayerKit


class NormWeight(nn.Module):
    """The learned factors of an RMS norm, [D]."""

    def __init__(self, width: int, layers: "LayerKit") -> None:
        super().__init__()
        self.weight = layers.replicated_parameter(torch.ones(width))


def modulated_norm(
    x_SBD: Tensor,
    shift_GD: Tensor,
    scale_GD: Tensor,
    eps: float,
    runs: tuple[Run, ...] | Tensor | None = None,
    rms_weight_D: Tensor | None = None,
) -> Tensor:
    """LayerNorm(x) * (1 + scale) + shift (adaLN, arXiv 2212.09748, section 3.2).

    With `rms_weight_D`, RMSNorm(x) * weight in place of LayerNorm(x). With `runs` the batch is one pack (B = 1) whose
    tokens they assign to the G rows (or a tensor does, [S]); without, row b belongs to batch element b.
    """
    is_rms = rms_weight_D is not None
    factor_GD = 1 + scale_GD if rms_weight_D is None else rms_weight_D * (1 + scale_GD)
    if runs is None:
        return _modulated_norm_of_batch(x_SBD, shift_GD, factor_GD, eps, is_rms)
    if (row_S := _row_of_token(runs, x_SBD.device)) is not None:
        return modulated_norm_by_token(x_SBD, shift_GD, factor_GD, eps, row_S, is_rms)
    return _ModulatedNorm.apply(x_SBD, shift_GD, factor_GD, eps, runs, is_rms)


def rms_norm(x_SBD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, the same for every sample."""
    return _normalize(x_SBD, eps, is_rms=True)[0] * weight_D


def gated_residual(
    x_SBD: Tensor, gate_GD: Tensor, y_SBD: Tensor, runs: tuple[Run, ...] | Tensor | None = None
) -> Tensor:
    """x + gate * y, each segment with its own gate."""
    if runs is None:
        return torch.addcmul(x_SBD, gate_GD, y_SBD)
    if (row_S := _row_of_token(runs, x_SBD.device)) is not None:
        return gated_residual_by_token(x_SBD, gate_GD, y_SBD, row_S)
    return _GatedResidual.apply(x_SBD, gate_GD, y_SBD, runs)


def _row_of_token(runs: tuple[Run, ...] | Tensor, device: torch.device) -> Tensor | None:
    """The row of each token, where it is looked up token by token."""
    if isinstance(runs, Tensor):
        return runs
    return row_of_token(runs, device) if device.type == "cuda" else None


def _modulated_norm_of_batch(x_SBD: Tensor, shift_GD: Tensor, factor_GD: Tensor, eps: float, is_rms: bool) -> Tensor:
    if not is_rms and not torch.compiler.is_compiling() and len(shift_GD) == 1:
        return F.layer_norm(x_SBD, x_SBD.shape[-1:], factor_GD[0], shift_GD[0], eps)  # in one pass
    y_SBD = _normalize(x_SBD, eps, is_rms)[0] if is_rms else F.layer_norm(x_SBD, x_SBD.shape[-1:], eps=eps)
    return torch.addcmul(shift_GD, y_SBD, factor_GD)


def _normalize(x: Tensor, eps: float, is_rms: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, mean, 1 / root): y = (x - mean) / root; an RMS norm has no mean."""
    if not is_rms:
        return torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # the mean of squares overflows half precision
    rms_inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (x * rms_inverse).to(x.dtype), None, rms_inverse


def _normalize_backward(grad_y: Tensor, x: Tensor, mean: Tensor | None, root_inverse: Tensor) -> Tensor:
    if mean is not None:
        return torch.ops.aten.native_layer_norm_backward(
            grad_y, x, x.shape[-1:], mean, root_inverse, None, None, [True, False, False]
        )[0]
    # d(x / rms) = (g - y mean(g y)) / rms, y = x / rms
    y = x * root_inverse
    return ((grad_y - y * (grad_y * y).mean(-1, keepdim=True)) * root_inverse).to(x.dtype)


def _tokens(x_S1D: Tensor, run: Run) -> Tensor:
    """A run's tokens as a uniform batch: a view [c, s, D]."""
    return x_S1D[run.start : run.stop].view(run.count, run.length, x_S1D.shape[-1])


def _rows(x_GD: Tensor, run: Run) -> Tensor:
    """A run's rows, ready to broadcast over tokens: a view [c, 1, D]."""
    return x_GD[run.segments, None]


def _sum_segments(x_S1D: Tensor, like_GD: Tensor, runs: tuple[Run, ...]) -> Tensor:
    """Sums the tokens of each segment: in float32, whatever precision the sum is rounded to."""
    total_GD = torch.zeros_like(like_GD)
    for run in runs:
        # a segment cut by sequence parallelism never appears twice in one rank's runs, so rows are written once
        total_GD[run.segments] = _tokens(x_S1D, run).sum(1, dtype=like_GD.dtype)
    return total_GD


class _ModulatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shift, factor, eps, runs, is_rms):
        y, mean, root_inverse = _normalize(x, eps, is_rms)
        for run in runs:
            tokens = _tokens(y, run)
            torch.addcmul(_rows(shift, run), tokens, _rows(factor, run), out=tokens)
        ctx.save_for_backward(x, factor, mean, root_inverse)
        ctx.runs = runs
        return y

    @staticmethod
    def backward(ctx, grad):
        x, factor, mean, root_inverse = ctx.saved_tensors
        grad = grad.contiguous()
        y = (x if mean is None else x - mean) * root_inverse
        product = y.to(grad.dtype).mul_(grad)
        grad_factor = _sum_segments(product, factor, ctx.runs)
        grad_shift = _sum_segments(grad, factor, ctx.runs)
        grad_y = product  # the product is spent: its memory holds the gradient of the normalised activations
        for run in ctx.runs:
            torch.mul(_tokens(grad, run), _rows(factor, run), out=_tokens(grad_y, run))
        grad_x = _normalize_backward(grad_y, x, mean, root_inverse)
        return grad_x, grad_shift, grad_factor, None, None, None


class _GatedResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, y, runs):
        out = torch.empty_like(x)
        for run in runs:
            torch.addcmul(_tokens(x, run), _rows(gate, run), _tokens(y, run), out=_tokens(out, run))
        ctx.save_for_backward(gate, y)
        ctx.runs = runs
        return out

    @staticmethod
    def backward(ctx, grad):
        gate, y = ctx.saved_tensors
        grad = grad.contiguous()
        grad_y = torch.mul(grad, y)
        grad_gate = _sum_segments(grad_y, gate, ctx.runs)
        for run in ctx.runs:
            torch.mul(_tokens(grad, run), _rows(gate, run), out=_tokens(grad_y, run))
        return grad, grad_gate, grad_y, None
