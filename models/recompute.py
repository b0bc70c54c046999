"""Activations that are computed twice instead of kept.

A norm, an activation function or a concatenation costs little to compute and much to store: its output is kept alive
only because the linear behind it saves its input for the backward. Here that linear saves a recipe instead.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SMALL = 2**20
"""Values with fewer elements are kept: computing them again takes longer than their memory is worth."""


_is_recomputed: ContextVar[bool] = ContextVar("is_recomputed", default=False)
"""Whether everything here is computed again in backward anyway."""


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """function(*inputs), keeping nothing but the inputs: all of it is computed again in backward.

    `function` must be deterministic.
    """

    def marked(*inputs: Any) -> Any:
        token = _is_recomputed.set(True)
        try:
            return function(*inputs)
        finally:
            _is_recomputed.reset(token)

    return checkpoint(marked, *inputs, use_reentrant=False, preserve_rng_state=False)


class _Recipe:
    """How to compute a tensor again."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple) -> None:
        self.function = function
        self.inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)

    def __call__(self) -> Tensor:
        with torch.no_grad():
            return self.function(*self.inputs)


def through(function: Callable[..., Tensor], *inputs, into: Callable[[Tensor], Tensor]) -> Tensor:
    """into(function(*inputs)), where whatever `into` would save of the value between is computed again in backward.

    `function` must be cheap and deterministic. Its inputs must be kept by someone else anyway (its own backward,
    usually), or nothing is won, and must not change in place before the backward: autograd does not watch them here.
    Nothing is recomputed without gradients, within `recomputed`, where the value is small, where it is not contiguous
    (what is saved of it may have another memory order), and under `torch.compile` (the compiler makes this choice).
    """
    value = function(*inputs)
    is_kept = value.numel() < SMALL or not value.requires_grad or not value.is_contiguous() or _is_recomputed.get()
    if is_kept or torch.compiler.is_compiling():
        return into(value)
    recipe, address, size = _Recipe(function, inputs), value.data_ptr(), value.numel()

    def pack(tensor: Tensor) -> Tensor | tuple[_Recipe, torch.Size]:
        # `value` outlives the hooks, so that its address cannot be another tensor's
        is_value = tensor.data_ptr() == address and tensor.numel() == size and tensor.is_contiguous()
        return (recipe, tensor.shape) if is_value else tensor

    def unpack(packed: Tensor | tuple[_Recipe, torch.Size]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        recipe, shape = packed
        return recipe().view(shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return into(value)
