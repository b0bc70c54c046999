"""Turns a plain network into a rank's shard: `parallelize` replaces modules and marks parameters as the plan says.

| in the plain network    | is replaced, if the layout needs it, by                                              |
|-------------------------|--------------------------------------------------------------------------------------|
| `Linear` of the plan    | Megatron's, TransformerEngine's, or an 8-bit one; ranks hold rows or columns         |
| other parameters        | the same, whole; a shard of experts                                                  |
| `enter`, `leave`        | scatter and gather of the tokens (sequence parallelism)                              |
| `SelfAttention.core`    | attention to other ranks' tokens (context parallelism); recomputation in backward    |
| `STDiTBlock.move`       | the exchange of tokens before attention along one axis                               |
| `ExpertMLP.compute`     | tokens sent to their experts' ranks; `expert_choice` among the tokens of all ranks   |
| `LowRank.exchange`, `WidthNorm.sum_over_ranks` | communication of ranks that share linears and heads           |
| `blocks`                | blocks with recomputation, offloaded activations, in FP8, or replayed as CUDA graphs |
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import Literal

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from megadit.models.lora.adapters import move_adapters
from megadit.models.megatron.graphed_blocks import GraphedBlocks
from megadit.models.megatron.groups import Groups
from megadit.models.megatron.linears.fp8 import fp8_linear
from megadit.models.megatron.linears.int8 import int8_linear
from megadit.models.megatron.linears.parallel import split_linear
from megadit.models.megatron.linears.te import fp8_arithmetic, te_linear
from megadit.models.megatron.parallelism.adapters import share_adapters
from megadit.models.megatron.parallelism.context import shared_attention
from megadit.models.megatron.parallelism.experts import Dispatch, shared_choice
from megadit.models.megatron.plan import PLAN, Axes, Row, local_shape, mark, role_of
from megadit.models.networks.attention import SelfAttention, WidthNorm
from megadit.models.networks.axial import move
from megadit.models.networks.blocks import BlockStack, STDiTBlock
from megadit.models.networks.experts import ExpertMLP
from megadit.models.networks.registry import Network, towers
from megadit.models.ops.ledger import cheap_values_recomputed, recomputed
from megadit.models.ops.offload import HostMemory, fetch_before

Recompute = Literal["none", "selective", "full"]
LinearKind = Literal["local", "fp8", "transformer_engine", "int8"]
LINEARS = {"local": split_linear, "fp8": fp8_linear, "transformer_engine": te_linear, "int8": int8_linear}
"""Kind of linears -> function that replaces a plain linear."""


def parallelize(
    dit: Network,
    config: TransformerConfig,
    groups: Groups,
    *,
    device: torch.device,
    plan: Sequence[Row] = PLAN,
    impl: LinearKind = "local",
    recompute: Recompute = "none",
    recompute_num_layers: int | None = None,
    cpu_offloading_num_layers: int = 0,
    cuda_graph_max_segments: int | None = None,
) -> Network:
    """Turns `dit`, built on the meta device, into this rank's shard, in place; values are set afterwards.

    Parameters keep their names, so that any layout reads and writes the same checkpoints. The whole network is never in
    memory.

    Args:
            dit: the network, or one model chunk of it.
            config: see `transformer_config`.
            groups: this rank's.
            device: where parameters get memory; on the meta device they get none.
            plan: how ranks share each parameter.
            impl: kind of linears; `fp8` multiplies as `config.fp8` says, `int8` is frozen.
            recompute: what is recomputed in backward: nothing, attention (`selective`), blocks (`full`).
            recompute_num_layers: how many blocks of the chunk are recomputed; None means all.
            cpu_offloading_num_layers: how many blocks of the chunk save their activations in host memory.
            cuda_graph_max_segments: replay blocks for packs with at most so many segments; None: never.

    Raises:
        LookupError: if the plan has no row for a parameter.
    """
    _hold_own_shards(dit, plan, config, groups.axes, impl, device)
    _share_tokens(dit, config, groups)
    _share_attention(dit, groups, recompute)
    _share_experts(dit, config, groups)
    share_adapters(dit, plan, groups.tensor, sequence_parallel=config.sequence_parallel)
    for tower in towers(dit):
        most = (recompute_num_layers or len(tower.blocks)) if recompute == "full" else 0
        blocks = dict(tower.blocks.items())
        arithmetic = fp8_arithmetic(config) if impl == "transformer_engine" else nullcontext
        made = RecomputedBlocks(blocks, most, arithmetic, cpu_offloading_num_layers)
        tower.blocks = made if cuda_graph_max_segments is None else GraphedBlocks(blocks, cuda_graph_max_segments)
    mark(dit, plan, sequence_parallel=config.sequence_parallel)
    return dit


def _hold_own_shards(
    dit: Network, plan: Sequence[Row], config: TransformerConfig, axes: Axes, impl: LinearKind, device: torch.device
) -> None:
    """Every parameter in the shape of this rank's shard, on `device`; linears are replaced as the plan says."""
    roles = {name: role_of(name, plan) for name, _ in dit.named_parameters()}
    for path, module in list(dit.named_modules()):
        role = roles.get(f"{path}.weight")
        if isinstance(module, nn.Linear) and role.is_linear:
            with device:
                split = LINEARS[impl](module, role, config)
            dit.set_submodule(path, split)
            move_adapters(module, split)
            continue
        for name, parameter in module.named_parameters(path, recurse=False):
            shape = local_shape(parameter.shape, roles[name], axes)
            setattr(module, name.rpartition(".")[2], nn.Parameter(torch.empty(shape, device=device)))


def _share_tokens(dit: Network, config: TransformerConfig, groups: Groups) -> None:
    group = groups.context.group
    if config.sequence_parallel:
        group = parallel_state.get_tensor_and_context_parallel_group()
        for tower in towers(dit):
            tower.enter, tower.leave = ScatterTokens(groups.tensor), GatherTokens(groups.tensor)
    if groups.mesh.size > 1:
        assert (group.size(), group.rank()) == (groups.mesh.size, groups.mesh.rank)
        for block in _all(dit, STDiTBlock):
            block.move = partial(move, group=group)


def _share_attention(dit: Network, groups: Groups, recompute: Recompute) -> None:
    for norm in _all(dit, WidthNorm):
        norm.sum_over_ranks = partial(sum_over_ranks, group=groups.tensor)
    for attention in _all(dit, SelfAttention):
        if groups.context.size > 1:
            attention.core = shared_attention(groups.context)
        if recompute == "selective":
            attention.core = partial(recomputed, attention.core)


def _share_experts(dit: Network, config: TransformerConfig, groups: Groups) -> None:
    mlps = list(_all(dit, ExpertMLP))
    context = groups.context if groups.context.size > 1 else None
    cut = groups.tensor if config.sequence_parallel else None
    if context is not None or cut is not None:
        for mlp in mlps:
            mlp.expert_choice = shared_choice(mlp.expert_choice, context, cut)
    if mlps and groups.expert.size() * groups.expert_tensor.size() > 1:
        dispatch = Dispatch(config, dit.config.experts.num_experts)
        for mlp in mlps:
            mlp.compute = dispatch


def _all(dit: Network, kind: type[nn.Module]) -> Iterator[nn.Module]:
    return (module for module in dit.modules() if isinstance(module, kind))


# Sequence parallelism (arXiv 2205.05198): each rank has some tokens outside, and some heads within, the linears that
# tensor-parallel ranks share.


class ScatterTokens(nn.Module):
    """Maps all tokens to this rank's slice of them."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x_SBD: Tensor) -> Tensor:
        """This rank's slice, [S / ranks, B, D]."""
        return scatter_to_sequence_parallel_region(x_SBD, group=self.group)


class GatherTokens(nn.Module):
    """Maps this rank's slice to all tokens."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x_SBD: Tensor) -> Tensor:
        # every rank computes the loss of all tokens: each keeps its slice of the gradient, without a sum
        """The tokens of all ranks, [S * ranks, B, D]."""
        return gather_from_sequence_parallel_region(x_SBD, tensor_parallel_output_grad=False, group=self.group)


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of `x`, of any shape, over ranks; the gradient is summed, too."""
    return copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(x, group=group), group=group)


# --- Blocks whose activations are recomputed in backward, or in host memory until then --------------------------------


class RecomputedBlocks(BlockStack):
    """Blocks, each within `arithmetic()`; the first `num_recomputed` save only their inputs, and the first
    `num_offloaded` of the others save in host memory."""

    def __init__(
        self,
        blocks: dict[str, nn.Module],
        num_recomputed: int,
        arithmetic: Callable[[], AbstractContextManager],
        num_offloaded: int = 0,
    ) -> None:
        super().__init__(blocks)
        self.num_recomputed, self.num_offloaded = num_recomputed, num_offloaded
        self.arithmetic = arithmetic

    def forward(self, x: Tensor, *context) -> Tensor:
        """Apply all blocks to tokens [S, B, D]."""
        before = None
        for index, block in enumerate(self.values()):
            if index < self.num_recomputed:
                x = recomputed(partial(self._compute, block), x, *context)
                continue
            memory = self._memory_of(index, block, x, context)
            with cheap_values_recomputed(memory):
                x = self._compute(block, x, *context)
            if before is not None:
                fetch_before(x, before)
            before = memory
        return x

    def first(self, count: int) -> "RecomputedBlocks":
        """Return the first `count` blocks, sharing their modules."""
        blocks = dict(islice(self.items(), count))
        return RecomputedBlocks(blocks, self.num_recomputed, self.arithmetic, self.num_offloaded)

    def _memory_of(self, index: int, block: nn.Module, x: Tensor, context: tuple) -> HostMemory | None:
        if index >= self.num_recomputed + self.num_offloaded or not torch.is_grad_enabled():
            return None
        shared = (leaf for leaf in tree_leaves(context) if isinstance(leaf, Tensor))
        return HostMemory(x.device, chain(block.parameters(), block.buffers(), shared))

    def _compute(self, block: nn.Module, x: Tensor, *context) -> Tensor:
        with self.arithmetic():
            return block(x, *context)
