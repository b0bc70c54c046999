"""Megatron's linears split over tensor-parallel ranks, as modules that return a tensor.

Shapes: S video tokens, B batch, D width.
"""

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megadit.models.megatron.plan import COLUMN, ROW, Role
from megadit.models.ops.reference import linear

SplitLinear = Callable[[nn.Linear, Role, TransformerConfig], nn.Module]
"""Signature of `split_linear`."""


def split_linear(plain: nn.Linear, role: Role, config: TransformerConfig) -> nn.Module:
    """Replace `plain` by Megatron's linear, whose matrix ranks share as `role` says."""
    has_bias = plain.bias is not None
    if role is ROW:
        return RowLinear(plain.in_features, plain.out_features, config, bias=has_bias)
    gathers = role is COLUMN
    return ColumnLinear(plain.in_features, plain.out_features, config, gathers=gathers, bias=has_bias)


class _AddsToSum(torch.autograd.Function):
    """A weight for Megatron's product, whose backward adds the weight's gradient to `main_grad` and returns none.

    Megatron marks the addition on the weight that it saved. With recomputation (`ops/ledger.py`) autograd returns
    another object, so the parameter is marked here.
    """

    @staticmethod
    def forward(ctx, weight):
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.weight.grad_added_to_main_grad = True
        return torch.empty_like(ctx.weight)  # never read: autograd needs a gradient to continue


class _CanonicalLinear:
    """Mixin for both of Megatron's parallel linears: canonical state dicts, and gradient accumulation fusion."""

    # Megatron adds an empty extra state for TransformerEngine; canonical state dicts have no such key
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def _forward_impl(self, input: Tensor, weight: nn.Parameter, *args, **options) -> Tensor:
        if self.gradient_accumulation_fusion and torch.is_grad_enabled():
            main_grad = weight.main_grad
            weight = _AddsToSum.apply(weight)
            weight.main_grad = main_grad
        return super()._forward_impl(input, weight, *args, **options)


class ColumnLinear(_CanonicalLinear, ColumnParallelLinear):
    """Megatron's layer, returning a tensor; without communication it is computed as an ordinary linear."""

    def __init__(
        self, in_features: int, out_features: int, config: TransformerConfig, *, gathers: bool, bias: bool
    ) -> None:
        super().__init__(in_features, out_features, config=config, init_method=_no_init, bias=bias)
        self._load_state_dict_pre_hooks.clear()
        self.sequence_parallel = self.sequence_parallel and gathers
        self.allreduce_dgrad = self.tp_group.size() > 1 and not self.sequence_parallel
        self.is_ordinary = _is_ordinary(self.tp_group, config)

    def forward(self, x_SBD: Tensor) -> Tensor:
        """This rank's outputs, [S, B, out / ranks]."""
        return linear(x_SBD, self.weight, self.bias) if self.is_ordinary else super().forward(x_SBD)[0]

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **how) -> Tensor:
        # with sequence parallelism Megatron's own product gathers the tokens again in backward
        if not input.is_cpu or self.gradient_accumulation_fusion or how["sequence_parallel"]:
            return super()._forward_impl(input, weight, bias=bias, **how)
        if how["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input, group=how["tp_group"])
        return linear(input, weight, bias)


class RowLinear(_CanonicalLinear, RowParallelLinear):
    """Megatron's layer, returning a tensor; without communication it is computed as an ordinary linear."""

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig, *, bias: bool) -> None:
        how = {"input_is_parallel": True, "skip_bias_add": False}
        super().__init__(in_features, out_features, config=config, init_method=_no_init, bias=bias, **how)
        self._load_state_dict_pre_hooks.clear()
        self.is_ordinary = _is_ordinary(self.tp_group, config)

    def forward(self, x_SBD: Tensor) -> Tensor:
        """Outputs of this rank's tokens, [S, B, out]."""
        return linear(x_SBD, self.weight, self.bias) if self.is_ordinary else super().forward(x_SBD)[0]

    def _forward_impl(self, input: Tensor, weight: Tensor, **how) -> Tensor:
        if not input.is_cpu or self.gradient_accumulation_fusion:
            return super()._forward_impl(input, weight, **how)
        return linear(input, weight)


def _is_ordinary(group: ProcessGroup, config: TransformerConfig) -> bool:
    """Whether the matrix is not split, and its gradient is accumulated by autograd."""
    return group.size() == 1 and not config.gradient_accumulation_fusion


def _no_init(weight: Tensor) -> None:
    """Do nothing: `initialize_dit_` sets the weights afterwards."""
