"""The layer kit of a DiT on Megatron-core: linears split over tensor-parallel ranks, tokens too if asked.

Keys and, on one rank, shapes are those of `TorchLayers`. What crosses ranks, and in which direction:

    column_linear("sharded")     all-gathers its tokens (sequence parallelism), or all-reduces its input's gradient
    column_linear("replicated")  all-reduces its input's gradient
    row_linear                   reduce-scatters its output over the tokens, or all-reduces it
    replicated_linear("sharded") has a partial gradient under sequence parallelism: it is marked, and summed by
                                 Megatron's finalize_model_grads
    through_experts              sends tokens to the ranks of their experts, and the results back
    choose                       gathers scores, where experts choose among all tokens of a sample

So are the norms of queries and keys, of whose heads a rank sees some: finalize_model_grads knows them by their names.

Shapes: S video tokens, B batch, D width, N heads of this rank, K head dim.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megadit.models.axial import Arrangement, move
from megadit.models.config import DiTConfig
from megadit.models.experts import HIDDEN_DIM, Experts, compute_here
from megadit.models.initialize import Fill, initialize_
from megadit.models.layers import BlockStack, Sequence
from megadit.models.layout import Layout
from megadit.models.megatron.context_parallel import ContextGroups, attend_shared
from megadit.models.megatron.expert_parallel import Dispatch, all_tokens, own_tokens
from megadit.models.megatron.graphed_blocks import GraphedBlocks
from megadit.models.megatron.groups import Axes
from megadit.models.megatron.linears import ColumnLinear, RowLinear, set_split
from megadit.models.megatron.parallel_sizes import ParallelSizes
from megadit.models.ops.attention import attention
from megadit.models.ops.ledger import cheap_values_recomputed, recomputed
from megadit.models.ops.linear import Linear

Recompute = Literal["none", "selective", "full"]


_OF_ONE_PART = ("x_embedder.", "blocks.", "final_layer.")
"""Beginnings of the names of parameters that one part of a pipeline has; of the others every part has a copy."""


def transformer_config(
    model: DiTConfig,
    layout: ParallelSizes,
    *,
    dtype: torch.dtype,
    gradient_accumulation_fusion: bool = False,
    fp8: str | None = None,
    fp8_recipe: str = "tensorwise",
) -> TransformerConfig:
    """What Megatron wants to know about a DiT; `dtype` is that of the parameters, the rest as Megatron calls it."""
    is_interleaved = layout.virtual_pipeline > 1
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        kv_channels=model.dim_per_head,
        ffn_hidden_size=model.mlp_size,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if is_interleaved else None,
        pipeline_dtype=dtype,
        # interleaved stages send in both directions at once: batched, Megatron gives wrong results with two stages
        overlap_p2p_comm=is_interleaved,
        batch_p2p_comm=not is_interleaved,
        context_parallel_size=layout.context,
        sequence_parallel=layout.sequence_parallel,
        add_bias_linear=False,
        qk_layernorm=model.qk_layernorm,  # finalize_model_grads sums the gradients of q_layernorm and k_layernorm
        layernorm_epsilon=model.layernorm_epsilon,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,  # linears are made on the device of torch's context
        perform_initialization=False,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        fp8=fp8,
        fp8_recipe=fp8_recipe,
        calculate_per_token_loss=True,
    )
    # finalize_model_grads sums the gradients of parameters marked `pipeline_parallel` only where it finds this
    config.has_cond_embedder = layout.pipeline > 1
    return config


class _Blocks(BlockStack):
    """Blocks, each within `arithmetic()`; the first `num_recomputed` keep their inputs and nothing else."""

    def __init__(
        self, blocks: dict[str, nn.Module], num_recomputed: int, arithmetic: Callable[[], AbstractContextManager]
    ) -> None:
        super().__init__(blocks)
        self.num_recomputed = num_recomputed
        self.arithmetic = arithmetic

    def forward(self, x: Tensor, *context) -> Tensor:
        for index, block in enumerate(self.values()):
            if index < self.num_recomputed:
                x = recomputed(partial(self._compute, block), x, *context)
            else:
                with cheap_values_recomputed():
                    x = self._compute(block, x, *context)
        return x

    def _compute(self, block: nn.Module, x: Tensor, *context) -> Tensor:
        with self.arithmetic():
            return block(x, *context)


class McoreLayers:
    """The layer kit on Megatron's linears; needs the process groups of `groups.initialize`."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        context: ContextGroups | None = None,
        part: int = 0,
        num_parts: int = 1,
        recompute: Recompute = "none",
        recompute_num_layers: int | None = None,
        cuda_graph_max_segments: int | None = None,
    ) -> None:
        """
        Args:
            config: see `transformer_config`.
            context: the ranks that share the tokens of a sample; None where each has all of them.
            part: which of `num_parts` parts of the network this is.
            recompute: what is computed again in backward: nothing, attention (`selective`), blocks (`full`).
            recompute_num_layers: how many blocks of the part; None means all.
            cuda_graph_max_segments: replay blocks for packs of so many segments at most; None: never.
        """
        self.config = config
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.context = context if context is not None and context.size > 1 else None
        self.part, self.num_parts = part, num_parts
        self.is_first_part, self.is_last_part = part == 0, part == num_parts - 1
        self.recompute, self.recompute_num_layers = recompute, recompute_num_layers
        self.cuda_graph_max_segments = cuda_graph_max_segments
        self.dispatch: Dispatch | None = None

    def column_linear(
        self, in_features: int, out_features: int, *, sequence: Sequence, bias: bool = False
    ) -> nn.Module:
        return ColumnLinear(in_features, out_features, self.config, is_sharded=sequence == "sharded", bias=bias)

    def row_linear(self, in_features: int, out_features: int, *, bias: bool = False) -> nn.Module:
        return RowLinear(in_features, out_features, self.config, bias=bias)

    def replicated_linear(
        self, in_features: int, out_features: int, *, sequence: Sequence, bias: bool = True
    ) -> nn.Module:
        layer = Linear(in_features, out_features, bias=bias)
        for parameter in layer.parameters():
            parameter.sequence_parallel = self.config.sequence_parallel and sequence == "sharded"
        return layer

    def replicated_parameter(self, value: Tensor) -> nn.Parameter:
        parameter = nn.Parameter(value)
        parameter.sequence_parallel = self.config.sequence_parallel
        return parameter

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, cross: bool) -> Tensor:
        if self.recompute == "selective" and not cross:
            return recomputed(self._attend, q, k, v, layout, cross)
        return self._attend(q, k, v, layout, cross)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, cross: bool) -> Tensor:
        if cross or self.context is None or layout.groups is None or layout.mesh.context == 1:
            return attention(q, k, v, layout, cross)
        return attend_shared(q, k, v, layout, self.context)

    def block_stack(self, make_block: Callable[[], nn.Module], num_layers: int) -> nn.Module:
        count = num_layers // self.num_parts
        blocks = {str(self.part * count + index): make_block() for index in range(count)}
        if self.cuda_graph_max_segments is not None:
            return GraphedBlocks(blocks, self.cuda_graph_max_segments)
        num_recomputed = 0
        if self.recompute == "full":
            num_recomputed = count if self.recompute_num_layers is None else self.recompute_num_layers
        return _Blocks(blocks, num_recomputed, self.arithmetic)

    def arithmetic(self) -> AbstractContextManager:
        """What a block computes within."""
        return nullcontext()

    def experts(self, make: Callable[[int, int], Experts], num_experts: int, hidden: int) -> Experts:
        group, tensor_group = (
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_expert_tensor_parallel_group(),
        )
        if group.size() * tensor_group.size() > 1 and self.dispatch is None:
            self.dispatch = Dispatch(self.config, num_experts)
        experts = make(num_experts // group.size(), hidden // tensor_group.size())
        for name, parameter in experts.named_parameters():
            mark_expert_(parameter, HIDDEN_DIM[name])
        return experts

    def choose(self, rule: Callable[[Tensor, Layout], Tensor], score_SBE: Tensor, layout: Layout) -> Tensor:
        if layout.groups is None:
            return rule(score_SBE, layout)
        cut = self.tensor_group if self.config.sequence_parallel else None
        chosen_SBE = rule(all_tokens(score_SBE, layout, self.context, cut), layout.whole)
        return own_tokens(chosen_SBE, layout, cut)

    def through_experts(self, experts: Experts, x_SBD: Tensor, weight_SBE: Tensor, chosen_SBE: Tensor) -> Tensor:
        compute = compute_here if self.dispatch is None else self.dispatch
        return compute(experts, x_SBD, weight_SBE, chosen_SBE)

    def shard_sequence(self, x_SBD: Tensor) -> Tensor:
        if not self.config.sequence_parallel:
            return x_SBD
        return scatter_to_sequence_parallel_region(x_SBD, group=self.tensor_group)

    def gather_sequence(self, x_SBD: Tensor) -> Tensor:
        if not self.config.sequence_parallel:
            return x_SBD
        # every rank computes the loss of all tokens: each keeps its slice of the gradient, nothing is summed
        return gather_from_sequence_parallel_region(x_SBD, tensor_parallel_output_grad=False, group=self.tensor_group)

    def move(self, x_SBD: Tensor, layout: Layout, source: Arrangement, target: Arrangement) -> Tensor:
        group = None
        if self.config.sequence_parallel:
            group = parallel_state.get_tensor_and_context_parallel_group()
        elif self.context is not None:
            group = self.context.group
        if group is not None and layout.groups is not None:
            assert (group.size(), group.rank()) == (layout.mesh.size, layout.mesh.rank)
        return move(x_SBD, layout, source, target, group)


def mark_expert_(parameter: nn.Parameter, hidden_dim: int) -> None:
    """Marks a tensor of experts: split over ranks along its experts and along their hidden width.

    Its gradient is summed over the ranks that hold the same experts (`allreduce` = False, in Megatron's words), not
    over those that hold the same attention.
    """
    set_split(parameter, hidden_dim)  # no rank of the group over which norms are summed has the same part
    parameter.splits = ((0, "expert"), (hidden_dim, "expert_tensor"))
    parameter.allreduce = False


def is_expert(parameter: Tensor) -> bool:
    return not getattr(parameter, "allreduce", True)


def mark_conditioning_(dit: nn.Module, *, is_first_part: bool) -> None:
    """Marks the copies that every part of a pipeline has of the conditioning.

    Their gradients are summed over the parts (`pipeline_parallel`), and count once in the norm (`shared`). Each has a
    bucket of its own (`shared_embedding`), so that the distributed optimizer of every part cuts it at the same places.
    """
    for name, parameter in dit.named_parameters():
        if not name.startswith(_OF_ONE_PART):
            parameter.pipeline_parallel = True
            parameter.shared_embedding = True
            parameter.shared = not is_first_part


def splits(parameter: Tensor) -> tuple[tuple[int, str], ...]:
    """(dimension, axis) of each split of a parameter over ranks (`groups.Axes`); () where each rank holds it whole."""
    if is_expert(parameter):
        return parameter.splits
    return ((parameter.partition_dim, "tensor"),) if getattr(parameter, "tensor_model_parallel", False) else ()


def full_shape(parameter: Tensor, axes: Axes) -> torch.Size:
    """The shape of a parameter before it was split over ranks."""
    shape = list(parameter.shape)
    for dim, axis in splits(parameter):
        shape[dim] *= axes[axis].size()
    return torch.Size(shape)


def shard(parameter: Tensor, value: Tensor, axes: Axes) -> Tensor:
    """The part of the whole tensor `value` that this rank's `parameter` holds."""
    for dim, axis in splits(parameter):
        size = parameter.shape[dim]
        value = value.narrow(dim, axes[axis].rank() * size, size)
    return value


def initialize_dit_(
    model: nn.Module,
    seed: int,
    axes: Axes,
    given: Callable[[str], Tensor] | None = None,
    *,
    assign: Fill = Tensor.copy_,
) -> nn.Module:
    """`initialize_` for a model split over ranks: the same network in any layout.

    `assign` sets a parameter from the tensor of its shape (of which other data-parallel ranks may hold a part).
    """
    return initialize_(
        model,
        seed,
        full_shape=lambda parameter: full_shape(parameter, axes),
        fill=lambda parameter, whole: assign(parameter, shard(parameter, whole, axes)),
        given=given,
    )
