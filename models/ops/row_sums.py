"""Backward of modulation in a pack, as kernels that read its tokens once: Triton kernels for GPUs.

The gradient of the tokens and the sums over all tokens of a modulation row need the same values; a compiler would
generate a kernel, a matrix product, and an intermediate tensor as long as the pack. Here a program processes a run of
tokens with one row, and keeps the row's sums in registers. The sums of a row's runs are then added in the order of the
runs: the same pack gives bitwise the same gradient. Empty runs, as in the padding of a recording's table, add 0 to
row 0.

Only imported if Triton is installed; `TRITON_INTERPRET=1` runs the kernels on a CPU.

Shapes: S tokens, D width, G modulation rows, P runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megadit.models.machine import on_its_gpu

COLUMNS = 1024
"""Columns of a row that one program processes, where columns are independent."""
RUNS_AT_ONCE = 16


@on_its_gpu
def norm_backward(
    grad_S1D: Tensor,
    x_S1D: Tensor,
    gain_GD: Tensor,
    mean_S11: Tensor,
    root_inverse_S11: Tensor,
    row_S: Tensor,
    starts_P: Tensor,
    is_rms: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x [S, 1, D], and of shift and gain [G, D], of y * (1 + gain) + shift with y = (x - mean) / root.

    An RMS norm's gain is the whole factor: y * gain + shift. `starts_P` is `ConditionRows.starts_of_runs`; rows of the
    gain may be parts of longer ones, all else is contiguous.
    """
    grad_x, width = torch.empty_like(x_S1D), x_S1D.shape[-1]
    block = triton.next_power_of_2(width)
    sums_2PD, row_P = _partial(2, starts_P, x_S1D)
    _norm_backward[(len(row_P),)](
        *(grad_S1D, x_S1D, gain_GD, mean_S11, root_inverse_S11, row_S, starts_P, grad_x, sums_2PD, row_P),
        gain_GD.stride(0),
        len(row_P),
        width,
        IS_RMS=is_rms,
        BLOCK=block,
        num_warps=num_warps(block),
    )
    return grad_x, *_of_rows(sums_2PD, row_P, gain_GD).unbind()


@on_its_gpu
def gate_backward(
    grad_S1D: Tensor, gate_GD: Tensor, y_S1D: Tensor, row_S: Tensor, starts_P: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of gate [G, D] and y [S, 1, D], of gate * y. `starts_P` is `ConditionRows.starts_of_runs`; rows of the
    gate may be parts of longer ones."""
    grad_y, width = torch.empty_like(y_S1D), y_S1D.shape[-1]
    sums_1PD, row_P = _partial(1, starts_P, y_S1D)
    _gate_backward[(len(row_P), triton.cdiv(width, COLUMNS))](
        *(grad_S1D, gate_GD, y_S1D, row_S, starts_P, grad_y, sums_1PD, row_P, gate_GD.stride(0), width), BLOCK=COLUMNS
    )
    return _of_rows(sums_1PD, row_P, gate_GD)[0], grad_y


def num_warps(block: int) -> int:
    """Warps of a program that keeps `block` elements of five tensors in registers: 16 of each in a thread."""
    return min(max(block // 512, 1), 32)


def _partial(count: int, starts_P: Tensor, x_S1D: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised memory for `count` sums of each run, and for its row."""
    num_runs = len(starts_P) - 1
    sums = torch.empty(count, num_runs, x_S1D.shape[-1], dtype=torch.float32, device=x_S1D.device)
    return sums, torch.empty(num_runs, dtype=torch.int64, device=x_S1D.device)


def _of_rows(sums_nPD: Tensor, row_P: Tensor, like_GD: Tensor) -> Tensor:
    """The sums of each row, [n, G, D]; a row without tokens has 0."""
    (count, num_runs, width), num_rows = sums_nPD.shape, len(like_GD)
    out = torch.empty(count, num_rows, width, dtype=like_GD.dtype, device=like_GD.device)
    grid = num_rows, triton.cdiv(width, COLUMNS), count
    _sum_runs[grid](sums_nPD, row_P, out, num_runs, num_rows, width, RUNS=RUNS_AT_ONCE, BLOCK=COLUMNS)
    return out


@triton.jit
def _norm_backward(
    grad_ptr,
    x_ptr,
    gain_ptr,
    mean_ptr,
    root_inverse_ptr,
    row_ptr,
    starts_ptr,
    grad_x_ptr,
    sums_ptr,
    row_of_run_ptr,
    gain_stride,
    num_runs,
    width,
    IS_RMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    run = tl.program_id(0)
    first, stop = tl.load(starts_ptr + run), tl.load(starts_ptr + run + 1)
    row = tl.load(row_ptr + first, first < stop, 0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(gain_ptr + row * gain_stride + column, inside, 0.0).to(tl.float32)
    if not IS_RMS:
        factor += 1
    of_shift, of_gain = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    at = first.to(tl.int64) * width + column
    for token in range(first, stop):
        grad = tl.load(grad_ptr + at, inside, 0.0).to(tl.float32)
        x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
        mean, root_inverse = tl.load(mean_ptr + token), tl.load(root_inverse_ptr + token)
        y = (x - mean) * root_inverse  # beyond the width, gradients are 0
        grad_y = grad * factor
        grad_x = grad_y - y * (tl.sum(grad_y * y) / width)
        if not IS_RMS:
            grad_x -= tl.sum(grad_y) / width
        tl.store(grad_x_ptr + at, (grad_x * root_inverse).to(grad_x_ptr.dtype.element_ty), inside)
        of_shift += grad
        of_gain += grad * y
        at += width
    tl.store(sums_ptr + run.to(tl.int64) * width + column, of_shift, inside)
    tl.store(sums_ptr + (num_runs + run).to(tl.int64) * width + column, of_gain, inside)
    tl.store(row_of_run_ptr + run, row)


@triton.jit
def _gate_backward(
    grad_ptr,
    gate_ptr,
    y_ptr,
    row_ptr,
    starts_ptr,
    grad_y_ptr,
    sums_ptr,
    row_of_run_ptr,
    gate_stride,
    width,
    BLOCK: tl.constexpr,
):
    run = tl.program_id(0)
    first, stop = tl.load(starts_ptr + run), tl.load(starts_ptr + run + 1)
    row = tl.load(row_ptr + first, first < stop, 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, inside, 0.0).to(tl.float32)
    of_gate = tl.zeros([BLOCK], tl.float32)
    at = first.to(tl.int64) * width + column
    for _token in range(first, stop):
        grad = tl.load(grad_ptr + at, inside, 0.0).to(tl.float32)
        of_gate += grad * tl.load(y_ptr + at, inside, 0.0).to(tl.float32)
        tl.store(grad_y_ptr + at, (grad * gate).to(grad_y_ptr.dtype.element_ty), inside)
        at += width
    tl.store(sums_ptr + run.to(tl.int64) * width + column, of_gate, inside)
    tl.store(row_of_run_ptr + run, row)  # every program of a run stores the same


@triton.jit
def _sum_runs(sums_ptr, row_of_run_ptr, out_ptr, num_runs, num_rows, width, RUNS: tl.constexpr, BLOCK: tl.constexpr):
    row, sort = tl.program_id(0), tl.program_id(2)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_runs, RUNS):
        run = first + tl.arange(0, RUNS)
        is_of_row = tl.load(row_of_run_ptr + run, run < num_runs, -1) == row
        at = (sort * num_runs + run).to(tl.int64)[:, None] * width + column[None, :]
        total += tl.sum(tl.load(sums_ptr + at, is_of_row[:, None] & inside[None, :], 0.0), 0)
    tl.store(
        out_ptr + (sort * num_rows + row).to(tl.int64) * width + column, total.to(out_ptr.dtype.element_ty), inside
    )
