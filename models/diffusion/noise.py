"""Counter-based randomness: every number is a function of (key, position, column, stream) and of nothing else.

Noise therefore belongs to samples, not to ranks: it does not depend on the batch, the device, the parallel layout or
what was drawn before. The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011, doi:10.1145/2063384.2063405). Words come from integer operations; normals from additions, multiplications,
divisions and square roots alone, which IEEE 754 rounds alike everywhere (library logarithms and cosines differ
between CPU and GPU, and between the body and the tail of a vector loop).

Shapes: R rows, B batch, C latent channels, T/H/W latent frames/height/width.
"""

import hashlib
import math
import warnings
from enum import IntEnum
from functools import cache
from typing import TypeVar

import torch
from einops import rearrange
from torch import Tensor

from megadit.models.ops.fusion import has_kernels

Words = TypeVar("Words", int, Tensor)

_WORD = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1


class Stream(IntEnum):
    """Independent sequences under one key."""

    NOISE = 0
    """Noise added in training; the initial noise of sampling."""
    SIGMA = 1
    TEXT_DROPOUT = 2
    WORD = 3
    """Normal vectors of words (hashed text features)."""
    KEEP = 4
    """Whether an epoch reads a sample."""
    CONDITIONING = 5
    """Choice of a sample's conditioning latents."""
    LEVEL = 6
    """A student's noise level, drawn from a list."""
    CONDITIONING_NOISE = 7
    """Noise added to conditioning latents, in networks that read them noised."""
    MIXUP = 8
    """Weight in mixup of two samples."""
    GUIDANCE = 9
    """Guidance scale of a sample that a guidance-distilled student is conditioned on."""
    ORDER = 10
    """Order of the packs of a reader, under the key of the run's seed."""
    DERIVED = 1 << 8
    """First of the streams of derived keys: the n-th further key of a sample takes DERIVED + n."""
    STEP = 1 << 16
    """First of the streams of noise that a sampler adds between steps: the n-th noise takes STEP + n."""


def sample_key(seed: int, sample_id: str, occurrence: int) -> int:
    """The key of a training sample, a signed 64-bit integer; `occurrence` counts how often it was drawn before."""
    return _hash64(f"sample {seed} {occurrence} {sample_id}")


def seed_key(seed: int) -> int:
    """The key of a generated video, which depends on its seed alone; a signed 64-bit integer."""
    return _hash64(f"seed {seed}")


def derived_keys(key_R: Tensor, number: int) -> Tensor:
    """Keys of the `number`-th (0, 1, ...) further random draw of each sample, int64 [R], independent of the others."""
    words_R14 = _words(key_R, torch.zeros_like(key_R), 1, Stream.DERIVED + number)
    return words_R14[:, 0, 0] << 32 | words_R14[:, 0, 1]


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def normal(key_R: Tensor, position_R: Tensor, width: int, *, stream: int | Tensor) -> Tensor:
    """Standard normal numbers, float32 [R, width], by Box and Muller (1958); none exceeds 6.8 in magnitude.

    `key_R` and `position_R` are int64, and so is `stream` [R] if each row has its own. Identical bit for bit on every
    device, unless a compiler fuses the operations.
    """
    if has_kernels(key_R) and kernel_is_exact(key_R.device):
        from megadit.models.diffusion.noise_kernel import normal_by_kernel

        return normal_by_kernel(key_R, position_R, width, stream)
    return normal_by_operations(key_R, position_R, width, stream=stream)


@cache
def kernel_is_exact(device: torch.device) -> bool:
    """Whether the kernel of `noise_kernel.py` computes the same bits on this device as `normal_by_operations`."""
    from megadit.models.diffusion.noise_kernel import normal_by_kernel

    position_R = torch.arange(4096, device=device)
    key_R = position_R * 0x5DEECE66D1CE4E5  # any that differ
    try:
        found = normal_by_kernel(key_R, position_R, 8, Stream.NOISE)
    except Exception as error:  # any error of compilers and drivers
        reason = (str(error).strip().splitlines() or [""])[0]
        warnings.warn(f"noise is computed without its kernel, which takes longer: {reason}", stacklevel=2)
        return False
    if torch.equal(found, normal_by_operations(key_R, position_R, 8, stream=Stream.NOISE)):
        return True
    warnings.warn("noise is computed without its kernel, which is not exact on this device", stacklevel=2)
    return False


def normal_by_operations(key_R: Tensor, position_R: Tensor, width: int, *, stream: int | Tensor) -> Tensor:
    """The definition of `normal`, float32 [R, width]; `stream` is a number, or int64 [R]."""
    words = _words(key_R, position_R, width, stream)
    radius = (-2 * _log((words[..., 0::2].double() + 0.5) * 2.0**-32)).sqrt()
    cosine, sine = _point_on_circle(words[..., 1::2])
    return _columns(torch.stack([radius * cosine, radius * sine], dim=-1), width)


def uniform(key_R: Tensor, position_R: Tensor, width: int, *, stream: int) -> Tensor:
    """Uniform numbers, float32 [R, width], in the open interval (0, 1): the midpoints of 2^23 equal parts."""
    words = _words(key_R, position_R, width, stream)
    return _columns(((words >> 9).double() + 0.5) * 2.0**-23, width)


def uniform_numbers(key: int, width: int, *, stream: int) -> list[float]:
    """The row of `uniform` for one key and position 0, computed without tensors: for few numbers that is faster."""
    key_words = key & _WORD, key >> 32 & _WORD
    words = [word for block in range(-(-width // 4)) for word in philox4x32((block, 0, 0, stream), key_words)]
    return [((word >> 9) + 0.5) * 2.0**-23 for word in words[:width]]


def latent_noise(key_B: Tensor, shape: tuple[int, int, int, int], *, stream: int = Stream.NOISE) -> Tensor:
    """Standard normal latents, float32 BCTHW, for `shape` (C, T, H, W).

    A row of `normal` is one latent position, (t H + h) W + w, and its columns are the channels: training on packed
    tokens draws the same numbers position by position.
    """
    C, T, H, W = shape
    position_R = torch.arange(T * H * W, device=key_B.device).repeat(len(key_B))
    noise_RC = normal(key_B.repeat_interleave(T * H * W), position_R, C, stream=stream)
    return rearrange(noise_RC, "(B T H W) C -> B C T H W", T=T, H=H, W=W).contiguous()


def philox4x32(counter: tuple[Words, ...], key: tuple[Words, ...]) -> tuple[Words, ...]:
    """Four 32-bit words from a counter of four and a key of two: Python's integers, or int64 tensors of shapes that
    broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(constant: int, x: Words) -> tuple[Words, Words]:
    """High and low word of a 32 x 32 bit product: in int64 it wraps around, and so keeps all of its 64 bits."""
    product = constant * x
    return product >> 32 & _WORD, product & _WORD


def _words(key_R: Tensor, position_R: Tensor, width: int, stream: int | Tensor) -> Tensor:
    """Random words [R, blocks, 4] in int64: enough blocks of four to fill `width` columns."""
    block = torch.arange(-(-width // 4), device=key_R.device)
    key_R1, position_R1 = key_R[:, None], position_R[:, None]
    stream_R1 = stream[:, None] if isinstance(stream, Tensor) else torch.full_like(block, stream)
    counter = (block, position_R1 & _WORD, position_R1 >> 32 & _WORD, stream_R1)
    words = philox4x32(counter, (key_R1 & _WORD, key_R1 >> 32 & _WORD))
    return torch.stack(words, dim=-1)


def _columns(numbers: Tensor, width: int) -> Tensor:
    """Float32 rows of `width` numbers from blocks [R, blocks, ...]."""
    return numbers.flatten(1)[:, :width].float().contiguous()


def _log(x: Tensor) -> Tensor:
    """ln x of positive float64 numbers: x = m 2^e with m in [1/2, 1), ln m = 2 artanh(s), s = (m - 1) / (m + 1).

    |s| <= 1/3, so that eleven terms of the series leave a relative error below 2e-12: nothing in float32.
    """
    mantissa, exponent = torch.frexp(x)
    s = (mantissa - 1) / (mantissa + 1)
    return exponent.double() * math.log(2) + 2 * s * _polynomial(s * s, [1 / (2 * n + 1) for n in range(11)])


def _point_on_circle(words: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (float64) of a uniform angle: two bits choose a quarter, thirty the angle t in it.

    |t| <= pi/4, so that these terms of the Taylor series leave errors below 1e-13.
    """
    quarter, within = words >> 30, words & 0x3FFF_FFFF
    t = ((within.double() + 0.5) * 2.0**-30 - 0.5) * (math.pi / 2)
    cosine = _polynomial(t * t, [(-1) ** n / math.factorial(2 * n) for n in range(8)])
    sine = t * _polynomial(t * t, [(-1) ** n / math.factorial(2 * n + 1) for n in range(7)])
    is_odd, sign = (quarter & 1).bool(), 1 - (quarter & 2)
    return sign * torch.where(is_odd, -sine, cosine), sign * torch.where(is_odd, cosine, sine)


def _polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    """sum_n coefficients[n] x^n, by Horner's rule."""
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value
