"""Adapters of linears that tensor-parallel ranks share: the communication between `down` and `up`.

| linear           | `down`    | communication of rank features         | `up`      |
|------------------|-----------|----------------------------------------|-----------|
| `COLUMN`         | whole     | the tokens, with sequence parallelism  | own rows  |
| `COLUMN_OF_TEXT` | whole     | none: every rank has the whole text    | own rows  |
| `ROW`            | own shard | the sum over ranks                     | whole     |

Compared with the linear's own communication, messages are smaller by the ratio of rank to width.
"""

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megadit.models.lora.layers import LowRank, adapters_of
from megadit.models.megatron.plan import COLUMN, ROW, Role, Row, role_of


def share_adapter(adapter: LowRank, role: Role, group: ProcessGroup, *, sequence_parallel: bool) -> None:
    """Set how an adapter is split, from how the ranks of `group` share its linear, whose weight has this role."""
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
