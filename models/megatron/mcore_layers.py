"""The layer kit of a DiT on Megatron-core: linears split over tensor-parallel ranks, tokens too if asked.

Keys and, on one rank, shapes are those of `TorchLayers`. What crosses ranks, and in which direction:

    column_linear("sharded")     all-gathers its tokens (sequence parallelism), or all-reduces its input's gradient
    column_linear("replicated")  all-reduces its input's gradient
    row_linear                   reduce-scatters its output over the tokens, or all-reduces it
    replicated_linear("sharded") has a partial gradient under sequence parallelism: it is marked, and summed by
                                 Megatron's finalize_model_grads

So are the norms of queries and keys, of whose heads a rank sees some: finalize_model_grads knows them by their names.

Shapes: S video tokens, B batch, D width, N heads of this rank, K head dim.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megadit.models.attention import attend
from megadit.models.config import DiTConfig
from megadit.models.initialize import initialize_
from megadit.models.layers import BlockStack, Layout, Sequence
from megadit.models.megatron.parallel_sizes import ParallelSizes
from megadit.models.segments import Run


def transformer_config(model: DiTConfig, layout: ParallelSizes, *, dtype: torch.dtype) -> TransformerConfig:
    """What Megatron wants to know about a DiT; `dtype` is that of the parameters."""
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        kv_channels=model.dim_per_head,
        ffn_hidden_size=model.mlp_size,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        sequence_parallel=layout.sequence_parallel,
        add_bias_linear=False,
        qk_layernorm=model.qk_layernorm,  # finalize_model_grads sums the gradients of q_layernorm and k_layernorm
        layernorm_epsilon=model.layernorm_epsilon,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
    )


class _ColumnLinear(ColumnParallelLinear):
    """Megatron's layer, returning a tensor; on one rank it is an ordinary linear and is called as one."""

    # Megatron adds an empty extra state for TransformerEngine's sake; canonical state dicts have no such key
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __init__(
        self, in_features: int, out_features: int, config: TransformerConfig, *, is_sharded: bool, bias: bool
    ) -> None:
        super().__init__(in_features, out_features, config=config, init_method=_no_init, bias=bias)
        self._load_state_dict_pre_hooks.clear()
        for parameter in self.parameters():
            set_split(parameter, 0)
        self.sequence_parallel = self.sequence_parallel and is_sharded
        self.allreduce_dgrad = self.tp_group.size() > 1 and not self.sequence_parallel
        self.is_split = self.tp_group.size() > 1

    def forward(self, x_SBD: Tensor) -> Tensor:
        return super().forward(x_SBD)[0] if self.is_split else F.linear(x_SBD, self.weight, self.bias)


class _RowLinear(RowParallelLinear):
    """Megatron's layer, returning a tensor; on one rank it is an ordinary linear and is called as one."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig, *, bias: bool) -> None:
        super().__init__(
            in_features,
            out_features,
            config=config,
            init_method=_no_init,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=False,
        )
        self._load_state_dict_pre_hooks.clear()
        set_split(self.weight, 1)
        self.is_split = self.tp_group.size() > 1

    def forward(self, x_SBD: Tensor) -> Tensor:
        return super().forward(x_SBD)[0] if self.is_split else F.linear(x_SBD, self.weight, self.bias)


def set_split(parameter: nn.Parameter, dim: int) -> None:
    """Marks a parameter as split over tensor-parallel ranks along `dim`."""
    for name in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(parameter, name):
            delattr(parameter, name)  # Megatron sets them where it initialises, and may not set them twice
    set_tensor_model_parallel_attributes(parameter, True, dim, 1)


def _no_init(weight: Tensor) -> None:
    """Weights are drawn afterwards, whole, by `initialize_dit_`."""


class McoreLayers:
    """The layer kit on Megatron's linears; needs the process groups of `groups.initialize`."""

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()

    def column_linear(
        self, in_features: int, out_features: int, *, sequence: Sequence, bias: bool = False
    ) -> nn.Module:
        return _ColumnLinear(in_features, out_features, self.config, is_sharded=sequence == "sharded", bias=bias)

    def row_linear(self, in_features: int, out_features: int, *, bias: bool = False) -> nn.Module:
        return _RowLinear(in_features, out_features, self.config, bias=bias)

    def replicated_linear(
        self, in_features: int, out_features: int, *, sequence: Sequence, bias: bool = True
    ) -> nn.Module:
        linear = nn.Linear(in_features, out_features, bias=bias)
        for parameter in linear.parameters():
            parameter.sequence_parallel = self.config.sequence_parallel and sequence == "sharded"
        return linear

    def replicated_parameter(self, value: Tensor) -> nn.Parameter:
        parameter = nn.Parameter(value)
        parameter.sequence_parallel = self.config.sequence_parallel
        return parameter

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, cross: bool, into: Callable[[Tensor], Tensor]
    ) -> Tensor:
        return attend(q, k, v, layout, cross=cross, into=into)

    def block_stack(self, make_block: Callable[[], nn.Module], num_layers: int) -> nn.Module:
        return BlockStack({str(index): make_block() for index in range(num_layers)})

    def shard_sequence(self, x_SBD: Tensor) -> Tensor:
        if not self.config.sequence_parallel:
            return x_SBD
        return scatter_to_sequence_parallel_region(x_SBD, group=self.tensor_group)

    def gather_sequence(self, x_SBD: Tensor) -> Tensor:
        if not self.config.sequence_parallel:
            return x_SBD
        # every rank computes the loss of all tokens: each keeps its slice of the gradient, nothing is summed
        return gather_from_sequence_parallel_region(x_SBD, tensor_parallel_output_grad=False, group=self.tensor_group)

    def local_runs(self, layout: Layout) -> tuple[Run, ...] | None:
        if not self.config.sequence_parallel or layout.runs is None:
            return layout.runs
        return layout.local_runs(self.tensor_group.rank(), self.tensor_group.size())


def split_dim(parameter: Tensor) -> int | None:
    """The dimension of a parameter that is split over tensor-parallel ranks; None where each rank holds it whole."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def full_shape(parameter: Tensor, tensor_size: int) -> torch.Size:
    """The shape of a parameter before it was split over `tensor_size` ranks."""
    shape, dim = list(parameter.shape), split_dim(parameter)
    if dim is not None:
        shape[dim] *= tensor_size
    return torch.Size(shape)


def shard(parameter: Tensor, value: Tensor, tensor_rank: int) -> Tensor:
    """The part of the whole tensor `value` that this rank's `parameter` holds."""
    dim = split_dim(parameter)
    if dim is None:
        return value
    size = parameter.shape[dim]
    return value.narrow(dim, tensor_rank * size, size)


def initialize_dit_(model: nn.Module, seed: int) -> nn.Module:
    """`initialize_` for a model split over tensor-parallel ranks: the same network in any layout."""
    group = parallel_state.get_tensor_model_parallel_group()
    return initialize_(
        model,
        seed,
        full_shape=lambda parameter: full_shape(parameter, group.size()),
        shard=lambda parameter, value: shard(parameter, value, group.rank()),
    )
