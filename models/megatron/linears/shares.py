"""A rank's shard of a linear with its own product, and the communication around it."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megadit.models.megatron.plan import COLUMN, ROW, Role
from megadit.models.ops.ledger import cheap


def _identity(x: Tensor) -> Tensor:
    return x


class Share(NamedTuple):
    """A rank's shard of a linear, and its communication."""

    out_features: int
    in_features: int
    num_biases: int | None = None
    """Size of the bias; None: no bias."""
    enter: Callable[[Tensor], Tensor] = _identity
    """Applied before the product."""
    leave: Callable[[Tensor], Tensor] = _identity
    """Applied after the product, before the bias is added."""


def share_of(plain: nn.Linear, role: Role, config: TransformerConfig) -> Share:
    """This rank's shard of `plain`, whose matrix ranks share as `role` says."""
    group = parallel_state.get_tensor_model_parallel_group()
    rows, columns = plain.out_features, plain.in_features
    gathers = role is COLUMN and config.sequence_parallel
    if role is ROW:
        cut, whole = reduce_scatter_to_sequence_parallel_region, reduce_from_tensor_model_parallel_region
        exchange = {"leave": cut if config.sequence_parallel else whole}
        columns, num_biases = columns // group.size(), rows
    else:
        exchange = {"enter": gather_from_sequence_parallel_region if gathers else copy_to_tensor_model_parallel_region}
        rows = num_biases = rows // group.size()
    bound = {} if group.size() == 1 else {when: partial(send, group=group) for when, send in exchange.items()}
    if gathers and bound:  # again in backward, as by Megatron's linears, instead of keeping the tokens of all ranks
        bound["enter"] = cheap(bound["enter"])
    return Share(rows, columns, num_biases if plain.bias is not None else None, **bound)
