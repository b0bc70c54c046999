"""FP8 codes of a matrix, and of its transpose, in one pass over memory: a Triton kernel for GPUs.

An FP8 product needs both matrices contiguous along the summed dimension, and gradients sum over another dimension than
the forward. A separate transpose of codes would read and write single bytes.

Only imported if Triton is installed; `TRITON_INTERPRET=1` runs the kernel on a CPU.

Shapes: N rows, K columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megadit.models.machine import on_its_gpu

ROWS, COLUMNS = 128, 64
"""Size of the tile that one program transposes."""
CODES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@on_its_gpu
def cast_transposed(x_NK: Tensor, factor: Tensor, dtype: torch.dtype, *, both: bool) -> tuple[Tensor | None, Tensor]:
    """(codes [N, K] if `both`, else None; codes [K, N]) of x [N, K] * factor [], float32,
    rounded to `dtype`."""
    x_NK = x_NK.contiguous()
    num_rows, num_columns = x_NK.shape
    turned = torch.empty(num_columns, num_rows, dtype=dtype, device=x_NK.device)
    plain = torch.empty(num_rows, num_columns, dtype=dtype, device=x_NK.device) if both else None
    grid = triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, COLUMNS)
    _cast[grid](
        *(x_NK, factor, turned if plain is None else plain, turned, num_rows, num_columns),
        BOTH=both,
        CODE=CODES[dtype],
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    return plain, turned


@triton.jit
def _cast(
    x_ptr,
    scale_ptr,
    plain_ptr,
    turned_ptr,
    num_rows,
    num_columns,
    BOTH: tl.constexpr,
    CODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None]
    at = row.to(tl.int64)[:, None] * num_columns + column[None]
    x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
    codes = (x * tl.load(scale_ptr)).to(CODE)
    if BOTH:
        tl.store(plain_ptr + at, codes, inside)
    turned_at = column.to(tl.int64)[:, None] * num_rows + row[None]
    tl.store(turned_ptr + turned_at, tl.trans(codes), tl.trans(inside))
