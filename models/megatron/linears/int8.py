"""Linears of a frozen base with int8 matrices, a byte for each weight.

    step_o = max |W_o| / 127        of each row, rounded up to bfloat16
    codes  = round(W / step)        int8, -127..127
    y      = x (step codes)^T + b

The matrix is dequantized for each product, in the precision of x, and then freed: the backward only computes
dx = dy (step codes). Steps depend on whole rows, so that any layout holds the same numbers. Steps from 2^-17 on are
exact in float16, too; smaller ones, of rows with all weights below 0.001, are rounded there.

Shapes: I and O input and output features, possibly sharded.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megadit.models.megatron.linears.shares import Share, share_of
from megadit.models.megatron.plan import Role, role_of
from megadit.models.ops.reference import linear

LARGEST = 127
STEPS_DTYPE = torch.bfloat16
"""Dtype that steps are rounded to, so that casting a network leaves them unchanged."""
_ROUNDED_UP = 1 + torch.finfo(STEPS_DTYPE).eps
"""Added so that no code exceeds the largest if the rounding goes down."""


class Int8Matrix(NamedTuple):
    """An int8 matrix."""

    weight_codes: Tensor
    """int8 [O, I]."""
    weight_steps: Tensor
    """float [O]."""

    @classmethod
    def of(cls, matrix_OI: Tensor) -> "Int8Matrix":
        """Quantize a whole matrix [O, I]: the error of each weight is at most half of its row's step."""
        steps_O = (matrix_OI.float().abs().amax(1) * (_ROUNDED_UP / LARGEST)).to(STEPS_DTYPE).float()
        codes_OI = (matrix_OI.float() / steps_O.clamp_min(torch.finfo(STEPS_DTYPE).tiny)[:, None]).round()
        return cls(codes_OI.to(torch.int8), steps_O)

    def in_precision(self, dtype: torch.dtype) -> Tensor:
        """The matrix, [O, I]."""
        return self.weight_codes.to(dtype) * self.weight_steps.to(dtype)[:, None]


class Int8Linear(nn.Module):
    """An int8 linear, or a rank's shard of one; it is frozen, and returns the gradient of its input."""

    def __init__(self, share: Share) -> None:
        super().__init__()
        self.share = share
        codes_OI = torch.empty(share.out_features, share.in_features, dtype=torch.int8)
        self.weight_codes = nn.Parameter(codes_OI, requires_grad=False)
        self.weight_steps = nn.Parameter(torch.empty(share.out_features), requires_grad=False)
        num_biases = share.num_biases
        self.bias = None if num_biases is None else nn.Parameter(torch.empty(num_biases), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The dequantized matrix, [O, I], in the precision of the steps (for DoRA's norms)."""
        return Int8Matrix(self.weight_codes, self.weight_steps).in_precision(self.weight_steps.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], for the tokens of the layout."""
        y = self.share.leave(_Product.apply(self.share.enter(x), self.weight_codes, self.weight_steps))
        return y if self.bias is None else y + self.bias


def int8_linear(plain: nn.Linear, role: Role, config: TransformerConfig) -> Int8Linear:
    """Replace `plain`, whose matrix ranks share as `role` says."""
    return Int8Linear(share_of(plain, role, config))


class _Product(torch.autograd.Function):
    """x (step codes)^T, whose backward dequantizes the matrix again instead of saving it."""

    @staticmethod
    def forward(ctx, x, codes, steps):
        ctx.save_for_backward(codes, steps)
        return linear(x, Int8Matrix(codes, steps).in_precision(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return linear(grad, Int8Matrix(*ctx.saved_tensors).in_precision(grad.dtype).t()), None, None


def eight_bits(weights: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Wrap `weights` (name -> whole tensor) to return tensors of an int8 base by name, codes and steps included.

    Tensors have the shapes of their parameters; a matrix that is held in int8 is dequantised from its codes.
    """

    def value(name: str) -> Tensor:
        linear_name, _, part = name.rpartition(".")
        if part in Int8Matrix._fields:
            return getattr(Int8Matrix.of(weights(f"{linear_name}.weight")), part)
        whole = weights(name)
        return Int8Matrix.of(whole).in_precision(torch.float32) if _is_held(name, whole) else whole

    return value


def _is_held(name: str, whole: Tensor) -> bool:
    return name.endswith(".weight") and whole.ndim == 2 and role_of(name).is_linear
