"""Linears with FP8 products in training, forward and backward, in plain torch.

    s     = 2^k, the largest with s max |x| < 2^top     of this rank's shard of a tensor
    codes = round(s x)                                  e4m3, or e5m2: three bits of mantissa, or two
    y     = codes_x codes_W^T / (s_x s_W)               sums in float32

and dx = dy W, dW = dy^T x likewise, with dy in the gradient format (arXiv 2209.05433). A power of two does not change
mantissas, so that a rank's shard of a matrix is rounded like the whole. Scales are computed from the current values:
there is no state between steps.

Within a step weights do not change (`weights_unchanged`). Each is scaled once, 8 bytes a matrix, and with
`train.fp8_weight_cache` cast once: the codes and their transpose take 2 bytes per weight, and each further micro-batch
moves 6 bytes per weight less. Recomputing blocks frees as much memory in about five times as much time (7B on an H100),
so that the cache pays only where nothing is recomputed.

Backward casts x again. The ops around linears (norms, activations, attention) save what x is recomputed from, so that
saving codes of x would add a byte per number instead of saving one.

Shapes: N tokens, I and O input and output features, possibly sharded; K is summed over.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megadit.models.megatron.linears.shares import Share, share_of
from megadit.models.megatron.plan import Role
from megadit.models.ops.fusion import fused, has_kernels
from megadit.models.ops.reference import linear


class Format(NamedTuple):
    """An FP8 format."""

    dtype: torch.dtype
    top: int
    """2^top is its largest power of two; beyond the largest number torch would return NaN."""


E4M3, E5M2 = Format(torch.float8_e4m3fn, 8), Format(torch.float8_e5m2, 15)
OF_GRADIENTS = {"e4m3": E4M3, "hybrid": E5M2}
"""`train.fp8` -> the format of gradients; all other tensors use `E4M3`."""


class Scale(NamedTuple):
    """Scale of an FP8 tensor: `factor` turns numbers into codes, `step` is its inverse; float32 [] each."""

    factor: Tensor
    step: Tensor


def scale_of(x: Tensor, of: Format) -> Scale:
    """The scale for all values of `x`, of any shape, without synchronizing with the device."""
    largest = torch.linalg.vector_norm(x.detach(), float("inf"), dtype=torch.float32)
    return Scale(*fused(_powers, largest, of.top))


def _powers(largest, top):
    exponent = largest.view(torch.int32) >> 23  # with the bias of 127: largest < 2^(exponent - 126)
    biased = (top + 126 + 127 - exponent).clamp(1, 253)  # so that scale and inverse are finite
    return (biased << 23).view(torch.float32), ((254 - biased) << 23).view(torch.float32)


def codes_of(x_NK: Tensor, scale: Scale, of: Format) -> Tensor:
    """float8 [N, K]."""
    return fused(_codes, x_NK, scale.factor, of.dtype)


def _codes(x, factor, dtype):
    return (x * factor).to(dtype)


def turned_codes_of(x_NK: Tensor, scale: Scale, of: Format, *, both: bool = False) -> tuple[Tensor | None, Tensor]:
    """(float8 [N, K] if `both`, else None; the same codes transposed, [K, N], contiguous)."""
    if has_kernels(x_NK):
        from megadit.models.ops.cast_transpose import cast_transposed

        return cast_transposed(x_NK, scale.factor, of.dtype, both=both)
    codes_NK = codes_of(x_NK, scale, of)
    return codes_NK if both else None, codes_NK.t().clone(memory_format=torch.contiguous_format)


def product(a_NK: Tensor, b_MK: Tensor, steps: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool) -> Tensor:
    """a b^T of two matrices of codes, both contiguous as GPU kernels require: [N, M].

    `steps` [] are the values of code 1 in each. `fast` accumulates in less than float32 where the GPU can: for
    forwards, where errors do not accumulate further.
    """
    return torch._scaled_mm(
        a_NK, b_MK.t(), scale_a=steps[0], scale_b=steps[1], out_dtype=dtype, use_fast_accum=fast
    )  # fmt: skip


class WeightCodes:
    """The scale and codes of one weight [O, I], from when they are first asked for; a weight that changes needs another
    instance."""

    def __init__(self, *, caches: bool = False) -> None:
        """`caches`: keep the codes, too, 2 bytes per weight; else compute them each time."""
        self._caches = caches
        self._scale: Scale | None = None
        self._plain: Tensor | None = None
        self._turned: Tensor | None = None

    def scale(self, weight_OI: Tensor) -> Scale:
        if self._scale is None:
            self._scale = scale_of(weight_OI, E4M3)
        return self._scale

    def plain(self, weight_OI: Tensor) -> Tensor:
        """float8 [O, I]."""
        if not self._caches:
            return codes_of(weight_OI, self.scale(weight_OI), E4M3)
        return self._cached(weight_OI)[0]

    def turned(self, weight_OI: Tensor) -> Tensor:
        """float8 [I, O], contiguous."""
        if not self._caches:
            return turned_codes_of(weight_OI, self.scale(weight_OI), E4M3)[1]
        return self._cached(weight_OI)[1]

    def _cached(self, weight_OI):
        if self._plain is None:
            self._plain, self._turned = turned_codes_of(weight_OI, self.scale(weight_OI), E4M3, both=True)
        return self._plain, self._turned


class _EightBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_OI, of_gradients, weight_codes):
        of_x, of_weight = scale_of(x, E4M3), weight_codes.scale(weight_OI)
        ctx.save_for_backward(x, weight_OI, *of_x)
        ctx.of_gradients, ctx.weight_codes = of_gradients, weight_codes
        codes = codes_of(x.flatten(0, -2), of_x, E4M3), weight_codes.plain(weight_OI)
        y_NO = product(*codes, (of_x.step, of_weight.step), x.dtype, fast=True)
        return y_NO.unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight_OI, *numbers = ctx.saved_tensors
        of_x, of_weight = Scale(*numbers), ctx.weight_codes.scale(weight_OI)
        grad_NO = grad.flatten(0, -2)
        of_grad = scale_of(grad_NO, ctx.of_gradients)
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        grad_x = grad_weight = codes_ON = None
        if needs_weight:
            codes_NO, codes_ON = turned_codes_of(grad_NO, of_grad, ctx.of_gradients, both=needs_x)
        else:
            codes_NO = codes_of(grad_NO, of_grad, ctx.of_gradients)
        if needs_x:
            codes_IO = ctx.weight_codes.turned(weight_OI)
            grad_x = product(codes_NO, codes_IO, (of_grad.step, of_weight.step), x.dtype, fast=False).view_as(x)
        if needs_weight:
            _, codes_IN = turned_codes_of(x.flatten(0, -2), of_x, E4M3)
            grad_weight = product(codes_ON, codes_IN, (of_grad.step, of_x.step), weight_OI.dtype, fast=False)
        return grad_x, grad_weight, None, None


class Fp8Linear(nn.Module):
    """A rank's shard of a linear, with FP8 products where gradients are computed, else in the weight's precision."""

    def __init__(self, share: Share, of_gradients: Format) -> None:
        super().__init__()
        self.share, self.of_gradients = share, of_gradients
        self.weight = nn.Parameter(torch.empty(share.out_features, share.in_features))
        self.bias = None if share.num_biases is None else nn.Parameter(torch.empty(share.num_biases))
        self.weight_codes: WeightCodes | None = None
        """Scale and codes of the current step; None: those of one call (`weights_unchanged`)."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], for the tokens of the layout."""
        x = self.share.enter(x)
        if torch.is_grad_enabled():
            y = _EightBitProduct.apply(x, self.weight, self.of_gradients, self.weight_codes or WeightCodes())
        else:
            y = linear(x, self.weight)
        y = self.share.leave(y)
        return y if self.bias is None else y + self.bias


@contextmanager
def weights_unchanged(networks: Sequence[nn.Module], *, caches: bool) -> Iterator[None]:
    """Within the block no weight changes (gathers of updated ones, which forwards wait for, are no change).

    Versions of tensors do not tell: optimizers and gathers write to other views of the memory.
    """
    layers = [module for network in networks for module in network.modules() if isinstance(module, Fp8Linear)]
    for layer in layers:
        layer.weight_codes = WeightCodes(caches=caches)
    try:
        yield
    finally:
        for layer in layers:
            layer.weight_codes = None


def fp8_linear(plain: nn.Linear, role: Role, config: TransformerConfig) -> Fp8Linear:
    """Replace `plain`, whose matrix ranks share as `role` says."""
    return Fp8Linear(share_of(plain, role, config), OF_GRADIENTS[config.fp8])
