"""Whole tensors and the shards of them that ranks hold, by the marks of `plan.py`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megadit.models.megatron.plan import Axes, Role, local_shape
from megadit.models.networks.initialize import Fill, initialize_


def splits(parameter: Tensor) -> tuple[tuple[int, str], ...]:
    """(dimension, axis) of each split of a `parameter` (of any shape) over ranks; (): each rank holds the whole."""
    if is_expert(parameter):
        return parameter.splits
    # an optimizer's float32 copies of parameters have only Megatron's marks
    return ((parameter.partition_dim, "tensor"),) if getattr(parameter, "tensor_model_parallel", False) else ()


def is_expert(parameter: Tensor) -> bool:
    """Whether a parameter (of any shape) belongs to experts, which are split over ranks."""
    return not getattr(parameter, "allreduce", True)


def full_shape(parameter: Tensor, axes: Axes) -> torch.Size:
    """The shape of a `parameter` (of any shape) before it was split over ranks."""
    shape = list(parameter.shape)
    for dim, axis in splits(parameter):
        shape[dim] *= axes[axis].size()
    return torch.Size(shape)


def shard(parameter: Tensor, value: Tensor, axes: Axes) -> Tensor:
    """This rank's shard of the whole tensor `value`, of any shape, for `parameter`, whose shape it has."""
    for dim, axis in splits(parameter):
        size = parameter.shape[dim]
        value = value.narrow(dim, axes[axis].rank() * size, size)
    return value


def own_shard(whole: Tensor, role: Role, axes: Axes) -> Tensor:
    """A rank's shard of a whole parameter of any shape, a view of it."""
    shape = local_shape(whole.shape, role, axes)
    for dim, axis in role.split:
        whole = whole.narrow(dim, axes[axis].rank() * shape[dim], shape[dim])
    return whole


def initialize_dit_(
    model: nn.Module,
    seed: int,
    axes: Axes,
    read: Callable[[str], Tensor] | None = None,
    *,
    assign: Fill = Tensor.copy_,
    selects: Callable[[str], bool] = lambda name: True,
) -> nn.Module:
    """`initialize_` for a model split over ranks: the same network in any layout.

    `assign` sets a parameter from a tensor of its shape (other data-parallel ranks may hold shards of it).
    """
    return initialize_(
        model,
        seed,
        full_shape=lambda parameter: full_shape(parameter, axes),
        fill=lambda parameter, whole: assign(parameter, shard(parameter, whole, axes)),
        read=read,
        selects=selects,
    )
