"""The normals of `noise.py` as one Triton kernel for GPUs, bit for bit; there they are some 250 small operations.

Double precision without fused multiply-adds (`enable_fp_fusion`), which would round once where `noise.py` rounds twice.

Only imported if Triton is installed; `TRITON_INTERPRET=1` runs the kernel on a CPU.

Shapes: R rows.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megadit.models.machine import on_its_gpu

BLOCKS = 256
"""Counters, of four words each, that one program turns into numbers."""
LOG = tl.constexpr(tuple(1 / (2 * n + 1) for n in reversed(range(11))))
COSINE = tl.constexpr(tuple((-1) ** n / math.factorial(2 * n) for n in reversed(range(8))))
SINE = tl.constexpr(tuple((-1) ** n / math.factorial(2 * n + 1) for n in reversed(range(7))))
"""Coefficients of `noise.py`'s series, the highest power first."""
LN_2, HALF_PI = tl.constexpr(math.log(2)), tl.constexpr(math.pi / 2)


@on_its_gpu
def normal_by_kernel(key_R: Tensor, position_R: Tensor, width: int, stream: int | Tensor) -> Tensor:
    """`noise.normal`, float32 [R, width]; `stream` is a number, or int64 [R] as keys and positions are."""
    stream_R = stream if isinstance(stream, Tensor) else torch.full_like(key_R, stream)
    key_R, position_R, stream_R = key_R.contiguous(), position_R.contiguous(), stream_R.contiguous()
    out_RW = torch.empty(len(key_R), width, device=key_R.device)
    per_row = triton.cdiv(width, 4)
    grid = (triton.cdiv(len(key_R) * per_row, BLOCKS),)
    if len(key_R):
        _normal[grid](
            *(key_R, position_R, stream_R, out_RW, len(key_R), width, per_row), BLOCKS=BLOCKS, enable_fp_fusion=False
        )
    return out_RW


@triton.jit
def _normal(key_ptr, position_ptr, stream_ptr, out_ptr, num_rows, width, per_row, BLOCKS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row, block = at // per_row, at % per_row
    inside = row < num_rows
    key, position = tl.load(key_ptr + row, inside, 0), tl.load(position_ptr + row, inside, 0)
    stream = tl.load(stream_ptr + row, inside, 0)
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    words = tl.philox(key, block.to(tl.uint32), low, high, stream.to(tl.uint32))
    column, place = block * 4, out_ptr + row * width + block * 4
    for half in tl.static_range(2):
        radius = _radius(words[2 * half])
        cosine, sine = _point_on_circle(words[2 * half + 1])
        tl.store(place + 2 * half, (radius * cosine).to(tl.float32), inside & (column + 2 * half < width))
        tl.store(place + 2 * half + 1, (radius * sine).to(tl.float32), inside & (column + 2 * half + 1 < width))


@triton.jit
def _radius(word):
    x = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1022  # x is positive, and no denormal
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | (1022 << 52)).to(tl.float64, bitcast=True)
    s = (mantissa - 1) / (mantissa + 1)
    logarithm = exponent.to(tl.float64) * LN_2 + 2 * s * _polynomial(s * s, LOG, 11)
    return tl.sqrt(-2 * logarithm)


@triton.jit
def _point_on_circle(word):
    quarter, within = word >> 30, word & 0x3FFFFFFF
    t = ((within.to(tl.float64) + 0.5) * 9.313225746154785e-10 - 0.5) * HALF_PI  # 2^-30
    cosine, sine = _polynomial(t * t, COSINE, 8), t * _polynomial(t * t, SINE, 7)
    is_odd, sign = (quarter & 1) != 0, 1.0 - (quarter & 2).to(tl.float64)
    return sign * tl.where(is_odd, -sine, cosine), sign * tl.where(is_odd, cosine, sine)


@triton.jit
def _polynomial(x, coefficients: tl.constexpr, COUNT: tl.constexpr):
    value = tl.zeros_like(x) + coefficients[0]
    for n in tl.static_range(1, COUNT):
        value = value * x + coefficients[n]
    return value
