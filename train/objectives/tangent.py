"""Exact directional derivative of a network, by forward-mode differentiation through its collectives.

Ops use their reference implementations (`ops.registry.by_reference`). Collectives are linear: the tangent of a
collective is the collective of the tangent. Those of `context.py` and `axial.py` implement `jvp`; for
Megatron's, listed in `EXCHANGES`, it is done here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from megatron.core.tensor_parallel import layers, mappings
from torch import Tensor
from torch.autograd import Function, forward_ad

from megadit.models.ops.registry import by_reference

COMMUNICATIONS: dict[type[Function], tuple[int, int | None]] = {
    mappings._CopyToModelParallelRegion: (0, None),
    mappings._ReduceFromModelParallelRegion: (0, None),
    mappings._ScatterToSequenceParallelRegion: (0, None),
    mappings._GatherFromSequenceParallelRegion: (0, None),
    mappings._ReduceScatterToSequenceParallelRegion: (0, None),
    mappings._AllToAll: (1, None),
    layers.LinearWithFrozenWeight: (0, 2),
    layers.LinearWithGradAccumulationAndAsyncCommunication: (0, 2),
}
"""Megatron's functions that are linear in one tensor -> index of that argument, and of one that is added to it."""


def derivative(function: Callable[..., Tensor], points: tuple[Tensor, ...], directions: tuple[Tensor, ...]) -> Tensor:
    """d/dh function(points + h directions) at h = 0, of the shape of the function's result, without a graph.

    All ranks that share the network call this together.
    """
    with torch.no_grad(), by_reference(), _of_tangents(), forward_ad.dual_level():
        duals = (forward_ad.make_dual(*pair) for pair in zip(points, directions, strict=True))
        value, tangent = forward_ad.unpack_dual(function(*duals))
    return torch.zeros_like(value) if tangent is None else tangent


@contextmanager
def _of_tangents() -> Iterator[None]:
    """Within the block Megatron's collectives accept tensors with tangents."""
    for function, places in COMMUNICATIONS.items():
        function.apply = staticmethod(_with_tangent(function.apply, *places))
    try:
        yield
    finally:
        for function in COMMUNICATIONS:
            del function.apply


def _with_tangent(apply: Callable[..., Tensor], place: int, added: int | None) -> Callable[..., Tensor]:
    """`apply`, linear in the argument at `place` except for the argument `added`."""

    def applied(*arguments) -> Tensor:
        value, tangent = forward_ad.unpack_dual(arguments[place])
        result = apply(*_replaced(arguments, {place: value}))
        if tangent is None:
            return result
        changes = {place: tangent} if added is None else {place: tangent, added: None}
        return forward_ad.make_dual(result, apply(*_replaced(arguments, changes)))

    return applied


def _replaced(arguments: tuple, changes: dict) -> list:
    return [changes.get(index, argument) for index, argument in enumerate(arguments)]
