"""Variants of `modulated_norm`.

On a CPU a pack's forward gathers no row per token: a length group is viewed as a batch and broadcast; only if
conditioning tokens cut the pack into many small groups, all tokens are processed at once. The backward reduces over
each segment in a fixed order, so that the same pack gives bitwise the same gradient; normalised activations are
recomputed instead of saved. On a GPU each token looks up its row inside one compiled kernel, and the backward is one
Triton kernel (`row_sums.py`); if the runs of tokens are unknown, there are two further products.

Shapes: S video tokens, B batch, D width, G modulation rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megadit.models.ops.condition_rows import (
    are_dense,
    are_grouped,
    are_in_runs,
    are_in_shreds,
    are_looked_up,
    rows_of,
    sum_rows,
    sum_tokens,
    tokens_of,
)
from megadit.models.ops.fusion import fused
from megadit.models.ops.reference import modulated_norm, modulation_factor, rms_normalized


def _is_one_sample(x, shift, scale, eps, rows=None, rms_weight=None) -> bool:
    return rows is None and rms_weight is None and len(shift) == 1


@modulated_norm.variant("one_sample", suits=_is_one_sample)
def one_sample(x_S1D: Tensor, shift_1D: Tensor, scale_1D: Tensor, eps: float, rows=None, rms_weight=None) -> Tensor:
    """torch's own norm with weight and bias, in one pass: [S, 1, D]."""
    return F.layer_norm(x_S1D, x_S1D.shape[-1:], modulation_factor(scale_1D, None)[0], shift_1D[0], eps)


@modulated_norm.variant("by_run", suits=lambda x, shift, scale, eps, rows=None, rms_weight=None: are_dense(rows))
def by_run(x_SBD, shift_GD, scale_GD, eps, rows, rms_weight_D=None) -> Tensor:
    """norm(x) (1 + scale) + shift, [S, B, D]; conditioning tokens and generated tokens each broadcast their row."""
    factor_GD = modulation_factor(scale_GD, rms_weight_D)
    y_SBD = _normalize(x_SBD, eps, rms_weight_D is not None)[0]
    runs = [torch.addcmul(shift_GD[own], y_SBD[first:stop], factor_GD[own]) for (first, stop), own in rows.runs]
    return torch.cat(runs)


@modulated_norm.variant(
    "by_run_of_tokens", suits=lambda x, shift, scale, eps, rows=None, rms_weight=None: are_in_runs(x, rows)
)
def by_run_of_tokens(x_S1D, shift_GD, scale_GD, eps, rows, rms_weight_D=None) -> Tensor:
    """norm(x) (1 + scale) + shift, [S, 1, D]; the backward reads its tokens once, also for the sums over rows."""
    of_tokens = rows.of_token(x_S1D.device), rows.starts_of_runs(x_S1D.device)
    return _ByRun.apply(x_S1D, shift_GD, _gain(scale_GD, rms_weight_D), eps, *of_tokens, rms_weight_D is not None)


@modulated_norm.variant(
    "by_token", suits=lambda x, shift, scale, eps, rows=None, rms_weight=None: are_looked_up(x, rows)
)
def by_token(x_S1D, shift_GD, scale_GD, eps, rows, rms_weight_D=None) -> Tensor:
    """norm(x) (1 + scale) + shift, [S, 1, D]; each token looks up its row."""
    row_S, is_rms = rows.of_token(x_S1D.device), rms_weight_D is not None
    return _ByToken.apply(x_S1D, shift_GD, _gain(scale_GD, rms_weight_D), eps, row_S, is_rms)


@modulated_norm.variant(
    "all_at_once", suits=lambda x, shift, scale, eps, rows=None, rms_weight=None: are_in_shreds(x, rows)
)
def all_at_once(x_S1D, shift_GD, scale_GD, eps, rows, rms_weight_D=None) -> Tensor:
    """norm(x) (1 + scale) + shift, [S, 1, D]; with a copy of the row for each token."""
    factor_GD, groups = modulation_factor(scale_GD, rms_weight_D), (rows.of_token(x_S1D.device),)
    return _ByGroup.apply(x_S1D, shift_GD, factor_GD, eps, groups, rms_weight_D is not None)


@modulated_norm.variant(
    "by_length_group", suits=lambda x, shift, scale, eps, rows=None, rms_weight=None: are_grouped(rows)
)
def by_length_group(x_S1D, shift_GD, scale_GD, eps, rows, rms_weight_D=None) -> Tensor:
    """norm(x) (1 + scale) + shift, [S, 1, D], one length group after another."""
    factor_GD = modulation_factor(scale_GD, rms_weight_D)
    return _ByGroup.apply(x_S1D, shift_GD, factor_GD, eps, rows.groups, rms_weight_D is not None)


# --- by group ---------------------------------------------------------------------------------------------------------


def _normalize(x: Tensor, eps: float, is_rms: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, mean, 1 / root): y = (x - mean) / root; an RMS norm has no mean."""
    if not is_rms:
        return torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
    y, rms_inverse = rms_normalized(x, eps)
    return y, None, rms_inverse


def _normalize_backward(grad_y: Tensor, x: Tensor, mean: Tensor | None, root_inverse: Tensor) -> Tensor:
    if mean is not None:
        return torch.ops.aten.native_layer_norm_backward(
            grad_y, x, x.shape[-1:], mean, root_inverse, None, None, [True, False, False]
        )[0]
    # d(x / rms) = (g - y mean(g y)) / rms, y = x / rms
    y = x * root_inverse
    return ((grad_y - y * (grad_y * y).mean(-1, keepdim=True)) * root_inverse).to(x.dtype)


class _ByGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shift, factor, eps, groups, is_rms):
        y, mean, root_inverse = _normalize(x, eps, is_rms)
        for group in groups:
            tokens = tokens_of(y, group)
            torch.addcmul(rows_of(shift, group), tokens, rows_of(factor, group), out=tokens)
        ctx.save_for_backward(x, factor, mean, root_inverse)
        ctx.groups = groups
        return y

    @staticmethod
    def backward(ctx, grad):
        x, factor, mean, root_inverse = ctx.saved_tensors
        grad = grad.contiguous()
        grad_y, grad_factor, grad_shift = torch.empty_like(grad), None, None
        if any(ctx.needs_input_grad[1:3]):
            y = (x if mean is None else x - mean) * root_inverse
            product = y.to(grad.dtype).mul_(grad)
            grad_factor = sum_tokens(product, factor, ctx.groups)
            grad_shift = sum_tokens(grad, factor, ctx.groups)
            grad_y = product  # reuses the product's memory
        for group in ctx.groups:
            torch.mul(tokens_of(grad, group), rows_of(factor, group), out=tokens_of(grad_y, group))
        grad_x = _normalize_backward(grad_y, x, mean, root_inverse)
        return grad_x, grad_shift, grad_factor, None, None, None


# --- by token -----------------------------------------------------------------------------------------------------


def _gain(scale_GD: Tensor, rms_weight_D: Tensor | None) -> Tensor:
    """The rows that kernels read: the scale, to which they add 1, or the whole factor of an RMS norm."""
    return scale_GD if rms_weight_D is None else modulation_factor(scale_GD, rms_weight_D)


def _factor_of_tokens(gain: Tensor, row_S: Tensor, is_rms: bool) -> Tensor:
    factor = gain.float()[row_S, None]
    return factor if is_rms else 1 + factor


def _forward(x, shift, gain, eps, row_S, is_rms):
    """The result, and the mean and 1 / root of each token in float32."""
    wide = x.float()
    mean = torch.zeros_like(wide[..., :1]) if is_rms else wide.mean(-1, keepdim=True)
    root_inverse = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    y = (wide - mean) * root_inverse * _factor_of_tokens(gain, row_S, is_rms) + shift.float()[row_S, None]
    return y.to(x.dtype), mean, root_inverse


def _backward(grad, x, gain, mean, root_inverse, row_S, is_rms):
    """Gradients of x, shift and gain."""
    y = (x.float() - mean) * root_inverse
    grad_y = grad.float() * _factor_of_tokens(gain, row_S, is_rms)
    grad_x = grad_y - y * (grad_y * y).mean(-1, keepdim=True)
    if not is_rms:
        grad_x = grad_x - grad_y.mean(-1, keepdim=True)
    grad_gain = sum_rows((grad.float() * y).to(x.dtype), row_S, len(gain))
    grad_shift = sum_rows(grad, row_S, len(gain))
    return (grad_x * root_inverse).to(x.dtype), grad_shift.to(gain.dtype), grad_gain.to(gain.dtype)


class _ByToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shift, gain, eps, row_S, is_rms):
        y, mean, root_inverse = fused(_forward, x, shift, gain, eps, row_S, is_rms)
        ctx.save_for_backward(x, gain, mean, root_inverse, row_S)
        ctx.is_rms = is_rms
        return y

    @staticmethod
    def backward(ctx, grad):
        return *fused(_backward, grad.contiguous(), *ctx.saved_tensors, ctx.is_rms), None, None, None


class _ByRun(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shift, gain, eps, row_S, starts_P, is_rms):
        y, mean, root_inverse = fused(_forward, x, shift, gain, eps, row_S, is_rms)
        ctx.save_for_backward(x, gain, mean, root_inverse, row_S, starts_P)
        ctx.is_rms = is_rms
        return y

    @staticmethod
    def backward(ctx, grad):
        from megadit.models.ops.row_sums import norm_backward

        x, gain, *of_tokens = ctx.saved_tensors
        rows = gain if gain.stride(-1) == 1 else gain.contiguous()
        return *norm_backward(grad.contiguous(), x.contiguous(), rows, *of_tokens, ctx.is_rms), None, None, None, None
