"""Variants of `gated_residual`.

Shapes: S video tokens, B batch, D width, G modulation rows.
"""

import torch
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
from megadit.models.ops.reference import gated_residual
from megadit.models.packing.layout import Rows


@gated_residual.variant("by_run", suits=lambda x, gate, y, rows=None: are_dense(rows))
def by_run(x_SBD: Tensor, gate_GD: Tensor, y_SBD: Tensor, rows: Rows | None) -> Tensor:
    """x + gate * y, [S, B, D]; conditioning tokens and generated tokens each broadcast their gate."""
    runs = [torch.addcmul(x_SBD[a:b], gate_GD[own], y_SBD[a:b]) for (a, b), own in rows.runs]
    return torch.cat(runs)


@gated_residual.variant("by_run_of_tokens", suits=lambda x, gate, y, rows=None: are_in_runs(x, rows))
def by_run_of_tokens(x_S1D: Tensor, gate_GD: Tensor, y_S1D: Tensor, rows: Rows | None) -> Tensor:
    """x + gate * y, [S, 1, D]; the backward reads its tokens once, also for the sums over rows."""
    return _ByRun.apply(x_S1D, gate_GD, y_S1D, rows.of_token(x_S1D.device), rows.starts_of_runs(x_S1D.device))


@gated_residual.variant("by_token", suits=lambda x, gate, y, rows=None: are_looked_up(x, rows))
def by_token(x_S1D: Tensor, gate_GD: Tensor, y_S1D: Tensor, rows: Rows | None) -> Tensor:
    """x + gate * y, [S, 1, D]; each token looks up its gate."""
    return _ByToken.apply(x_S1D, gate_GD, y_S1D, rows.of_token(x_S1D.device))


@gated_residual.variant("all_at_once", suits=lambda x, gate, y, rows=None: are_in_shreds(x, rows))
def all_at_once(x_S1D: Tensor, gate_GD: Tensor, y_S1D: Tensor, rows: Rows | None) -> Tensor:
    """x + gate * y, [S, 1, D]; with a copy of the gate for each token."""
    return _ByGroup.apply(x_S1D, gate_GD, y_S1D, (rows.of_token(x_S1D.device),))


@gated_residual.variant("by_length_group", suits=lambda x, gate, y, rows=None: are_grouped(rows))
def by_length_group(x_S1D: Tensor, gate_GD: Tensor, y_S1D: Tensor, rows: Rows | None) -> Tensor:
    """x + gate * y, [S, 1, D], one length group after another."""
    return _ByGroup.apply(x_S1D, gate_GD, y_S1D, rows.groups)


def _forward(x, gate, y, row_S):
    return x + gate[row_S, None] * y


def _backward(grad, gate, y, row_S):
    """Gradients of gate (None without y) and y."""
    grad_gate = None if y is None else sum_rows(grad * y, row_S, len(gate)).to(gate.dtype)
    return grad_gate, grad * gate[row_S, None]


def _if_gate_learns(ctx, y):
    """y if the gate needs a gradient, else None."""
    return y if ctx.needs_input_grad[1] else None


class _ByToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, y, row_S):
        ctx.save_for_backward(gate, _if_gate_learns(ctx, y), row_S)
        return fused(_forward, x, gate, y, row_S)

    @staticmethod
    def backward(ctx, grad):
        gate, *others = ctx.saved_tensors
        return grad, *fused(_backward, grad.contiguous(), gate, *others), None


class _ByRun(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, y, row_S, starts_P):
        ctx.save_for_backward(gate, _if_gate_learns(ctx, y), row_S, starts_P)
        return fused(_forward, x, gate, y, row_S)

    @staticmethod
    def backward(ctx, grad):
        gate, y, row_S, starts_P = ctx.saved_tensors
        grad = grad.contiguous()
        if y is None:
            return grad, *fused(_backward, grad, gate, None, row_S), None, None
        from megadit.models.ops.row_sums import gate_backward

        rows = gate if gate.stride(-1) == 1 else gate.contiguous()
        return grad, *gate_backward(grad, rows, y.contiguous(), row_S, starts_P), None, None


class _ByGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, y, groups):
        out = torch.empty_like(x)
        for group in groups:
            torch.addcmul(tokens_of(x, group), rows_of(gate, group), tokens_of(y, group), out=tokens_of(out, group))
        ctx.save_for_backward(gate, _if_gate_learns(ctx, y))
        ctx.groups = groups
        return out

    @staticmethod
    def backward(ctx, grad):
        gate, y = ctx.saved_tensors
        grad = grad.contiguous()
        grad_y, grad_gate = torch.empty_like(grad), None
        if y is not None:
            grad_gate = sum_tokens(torch.mul(grad, y, out=grad_y), gate, ctx.groups)
        for group in ctx.groups:
            torch.mul(tokens_of(grad, group), rows_of(gate, group), out=tokens_of(grad_y, group))
        return grad, grad_gate, grad_y, None
