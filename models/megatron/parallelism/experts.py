"""Experts on several ranks: Megatron's token dispatcher for our experts, and expert choice among tokens of all ranks.

Expert-parallel ranks hold different experts and different tokens. Tokens are sorted by expert, sent to its rank
(all-to-all), and gathered among the ranks that share an expert's matrices; results return the same way. No token is
dropped, and there is no fixed capacity: ranks receive as many tokens as were chosen.

Shapes: S video tokens of this rank, B batch, D width, E experts.
"""

from copy import copy

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megadit.models.host_to_device import Need
from megadit.models.megatron import cpu_shim
from megadit.models.megatron.parallelism.context import ContextGroups
from megadit.models.networks.experts import ExpertChoice, Experts
from megadit.models.packing.layout import Layout
from megadit.models.packing.pack_layout import CPU, PackLayout


class Dispatch:
    """Like `experts.compute_here`, for experts on several ranks; all of their ranks call it together."""

    def __init__(self, config: TransformerConfig, num_experts: int) -> None:
        cpu_shim.install_for_experts()
        config = copy(config)  # with experts in it, Megatron's schedules expect its own losses
        config.num_moe_experts = num_experts
        # without a capacity Megatron assumes equally many experts for every token; nothing is dropped
        config.moe_expert_capacity_factor = 1.0
        groups = get_default_pg_collection()
        num_local = num_experts // groups.ep.size()
        first = groups.ep.rank() * num_local
        self._dispatcher = MoEAlltoAllTokenDispatcher(
            num_local, list(range(first, first + num_local)), config=config, pg_collection=groups
        )

    def __call__(self, experts: Experts, x_SBD: Tensor, weight_SBE: Tensor, chosen_SBE: Tensor) -> Tensor:
        dispatcher = self._dispatcher
        here = dispatcher.dispatch_preprocess(x_SBD, chosen_SBE.flatten(0, 1), weight_SBE.flatten(0, 1))
        x_ND, counts_E, weight_N = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*here))
        y_ND = dispatcher.combine_preprocess(experts(x_ND, weight_N, counts_E))
        return dispatcher.combine_postprocess(dispatcher.token_combine(y_ND))


def shared_choice(rule: ExpertChoice, context: ContextGroups | None, cut: ProcessGroup | None) -> ExpertChoice:
    """rule(scores of all tokens of a pack), reduced to the rows of this rank's tokens; groups as in `all_tokens`."""

    def choose(score_SBE: Tensor, layout: Layout) -> Tensor:
        if layout.groups is None:
            return rule(score_SBE, layout)
        chosen_SBE = rule(all_tokens(score_SBE, layout, context, cut), layout.whole)
        return own_tokens(chosen_SBE, layout, cut)

    return choose


def all_tokens(x_S1E: Tensor, layout: PackLayout, context: ContextGroups | None, cut: ProcessGroup | None) -> Tensor:
    """The rows of all tokens of a pack, in its order, from those of this rank.

    Args:
            x_S1E: a row for each of this rank's tokens, without gradient.
            layout: this rank's CP shard of the pack.
            context: the ranks that share every sample; None: each has all tokens.
            cut: the ranks that split that shard by sequence parallelism.
    """
    shard = torch.cat(_gather(x_S1E, cut)) if cut is not None else x_S1E
    if context is None:
        return shard
    whole = shard.new_empty(layout.whole.capacity, *shard.shape[1:])
    for index_S, part in zip(Need(layout, _indices).on(shard.device), _gather(shard, context.group), strict=True):
        whole[index_S] = part
    return whole


def choice_needs(layout: PackLayout) -> list[Need]:
    """Return the tensors that expert choice over all context-parallel ranks reads on a device."""
    return [Need(layout, _indices)]


def _indices(layout: PackLayout) -> list[Tensor]:
    """int64: the indices in the whole sequence of the tokens of each CP shard."""
    shards = [layout.shard(layout.mesh.at(rank)) for rank in range(layout.mesh.context)]
    return [shard.on(CPU).index_S for shard in shards]


def own_tokens(x_S1E: Tensor, layout: PackLayout, cut: ProcessGroup | None) -> Tensor:
    """The inverse of `all_tokens`: this rank's rows [S', 1, E] of all tokens' rows."""
    shard = x_S1E[layout.on(x_S1E.device).index_S]
    return shard if cut is None else shard.chunk(cut.size())[cut.rank()]


def _gather(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts
