"""Turns a plain network into a rank's shard: `parallelize` replaces modules and marks parameters as the plan says.

| in the plain network    | is replaced, if the layout needs it, by                                              |
|-------------------------|--------------------------------------------------------------------------------------|
| `Linear` of the plan    | Megatron's, TransformerEngine's, or an 8-bit one; ranks hold rows or columns         |
| other parameters        | the same, whole; a shard of experts                                                  |
| `enter`, `leave`        | scatter and gather of the tokens (sequence parallelism)                              |
| `SelfAttention.core`    | attention to other ranks' tokens (context parallelism)                               |
| `STDiTBlock.move`       | the exchange of tokens before attention along one axis                               |
| `ExpertMLP.compute`     | tokens sent to their experts' ranks; `expert_choice` among the tokens of all ranks   |
| `LowRank.exchange`, `WidthNorm.sum_over_ranks` | communication of ranks that share linears and heads           |
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megadit.models.lora.layers import LowRank, adapters_of, move_adapters
from megadit.models.megatron.groups import Groups
from megadit.models.megatron.linears.parallel import SplitLinear, split_linear
from megadit.models.megatron.parallelism.context import shared_attention
from megadit.models.megatron.parallelism.experts import Dispatch, shared_choice
from megadit.models.megatron.plan import COLUMN, PLAN, ROW, Axes, Role, Row, local_shape, mark, role_of
from megadit.models.networks.attention import SelfAttention, WidthNorm
from megadit.models.networks.axial import move
from megadit.models.networks.blocks import STDiTBlock
from megadit.models.networks.experts import ExpertMLP
from megadit.models.networks.registry import towers


def parallelize(
    network: nn.Module,
    config: TransformerConfig,
    groups: Groups,
    *,
    device: torch.device,
    plan: Sequence[Row] = PLAN,
    split: SplitLinear = split_linear,
) -> nn.Module:
    """Turns `network`, built on the meta device, into this rank's shard, in place; values are set afterwards.

    Parameters keep their names, so that any layout reads and writes the same checkpoints. The whole network is never in
    memory.

    Args:
        network: the network, or one model chunk of it.
        config: see `transformer_config`.
        groups: this rank's.
        device: where parameters get memory; on the meta device they get none.
        plan: how ranks share each parameter.
        split: replaces each linear (`blocks.LINEARS`).

    Raises:
        LookupError: if the plan has no row for a parameter.
    """
    shard_parameters(network, config, groups.axes, device=device, plan=plan, split=split)
    connect_ranks(network, config, groups, plan)
    return network


def shard_parameters(
    network: nn.Module,
    config: TransformerConfig,
    axes: Axes,
    *,
    device: torch.device,
    plan: Sequence[Row] = PLAN,
    split: SplitLinear = split_linear,
) -> None:
    """Every parameter in the shape of this rank's shard, on `device`, and marked; linears are replaced as the plan
    says."""
    roles = {name: role_of(name, plan) for name, _ in network.named_parameters()}
    for path, module in list(network.named_modules()):
        role = roles.get(f"{path}.weight")
        if isinstance(module, nn.Linear) and role.is_linear:
            with device:
                made = split(module, role, config)
            network.set_submodule(path, made)
            move_adapters(module, made)
            continue
        for name, parameter in module.named_parameters(path, recurse=False):
            shape = local_shape(parameter.shape, roles[name], axes)
            setattr(module, name.rpartition(".")[2], nn.Parameter(torch.empty(shape, device=device)))
    mark(network, plan, sequence_parallel=config.sequence_parallel)


def connect_ranks(network: nn.Module, config: TransformerConfig, groups: Groups, plan: Sequence[Row] = PLAN) -> None:
    """Sets what modules send to other ranks when they compute: tokens, partial sums, keys and values."""
    _share_tokens(network, config, groups)
    _share_attention(network, groups)
    _share_experts(network, config, groups)
    share_adapters(network, plan, groups.tensor, sequence_parallel=config.sequence_parallel)


def _share_tokens(network: nn.Module, config: TransformerConfig, groups: Groups) -> None:
    group = groups.context.group
    if config.sequence_parallel:
        group = parallel_state.get_tensor_and_context_parallel_group()
        scatter = partial(scatter_to_sequence_parallel_region, group=groups.tensor)
        # every rank computes the loss of all tokens: each keeps its slice of the gradient, without a sum
        gather = partial(gather_from_sequence_parallel_region, tensor_parallel_output_grad=False, group=groups.tensor)
        for tower in towers(network):
            tower.enter, tower.leave = Exchange(scatter), Exchange(gather)
    if groups.mesh.size > 1:
        assert (group.size(), group.rank()) == (groups.mesh.size, groups.mesh.rank)
        for block in _all(network, STDiTBlock):
            block.move = partial(move, group=group)


def _share_attention(network: nn.Module, groups: Groups) -> None:
    for norm in _all(network, WidthNorm):
        norm.sum_over_ranks = partial(sum_over_ranks, group=groups.tensor)
    if groups.context.size > 1:
        for attention in _all(network, SelfAttention):
            attention.core = shared_attention(groups.context)


def _share_experts(network: nn.Module, config: TransformerConfig, groups: Groups) -> None:
    mlps = list(_all(network, ExpertMLP))
    context = groups.context if groups.context.size > 1 else None
    cut = groups.tensor if config.sequence_parallel else None
    if context is not None or cut is not None:
        for mlp in mlps:
            mlp.expert_choice = shared_choice(mlp.expert_choice, context, cut)
    if mlps and groups.expert.size() * groups.expert_tensor.size() > 1:
        dispatch = Dispatch(config, network.config.experts.num_experts)
        for mlp in mlps:
            mlp.compute = dispatch


def _all(network: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    return (module for module in network.modules() if isinstance(module, kind))


# Sequence parallelism (arXiv 2205.05198): each rank has some tokens outside, and some heads within, the linears that
# tensor-parallel ranks share.


class Exchange(nn.Module):
    """A function of tokens, in place of `enter` and `leave`."""

    def __init__(self, exchange: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.exchange = exchange

    def forward(self, x_SBD: Tensor) -> Tensor:
        """The slice of all tokens for this rank, or the reverse: [S, B, D] -> [S', B, D]."""
        return self.exchange(x_SBD)


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of `x`, of any shape, over ranks; the gradient is summed, too."""
    return copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(x, group=group), group=group)


def share_adapter(adapter: LowRank, role: Role, group: ProcessGroup, *, sequence_parallel: bool) -> None:
    """Set how an adapter is split, from how the ranks of `group` share its linear, whose weight has this role.

    | linear           | `down`    | communication of rank features         | `up`      |
    |------------------|-----------|----------------------------------------|-----------|
    | `COLUMN`         | whole     | the tokens, with sequence parallelism  | own rows  |
    | `COLUMN_OF_TEXT` | whole     | none: every rank has the whole text    | own rows  |
    | `ROW`            | own shard | the sum over ranks                     | whole     |

    Compared with the linear's own communication, messages are smaller by the ratio of rank to width.
    """
    if role is ROW:
        size = adapter.in_features // group.size()
        adapter.own_inputs = slice(group.rank() * size, (group.rank() + 1) * size)
        adapter.sum_inputs = partial(_sum, group=group)
        cut, whole = reduce_scatter_to_sequence_parallel_region, reduce_from_tensor_model_parallel_region
        adapter.exchange = partial(cut if sequence_parallel else whole, group=group)
    elif role is COLUMN and sequence_parallel:
        adapter.exchange = partial(gather_from_sequence_parallel_region, group=group)
    else:  # no communication forward; gradients are summed
        adapter.exchange = partial(copy_to_tensor_model_parallel_region, group=group)


def share_adapters(network: nn.Module, plan: Sequence[Row], group: ProcessGroup, *, sequence_parallel: bool) -> None:
    """Set this for the adapters of all linears that the ranks of `group` share by the plan."""
    for path, module in network.named_modules():
        if adapters_of(module) and (role := role_of(f"{path}.weight", plan)).is_linear and group.size() > 1:
            for adapter in module.adapters.values():
                share_adapter(adapter, role, group, sequence_parallel=sequence_parallel)


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    dist.all_reduce(x, group=group)
    return x
