"""Activation recomputation: values that are recomputed in backward instead of saved.

    full        `recomputed(block, x)` saves only the block's input
    selective   `recomputed(attention, q, k, v)` saves the queries, keys and values of an attention
    cheap       within `cheap_values_recomputed()`, results of cheap functions are not saved

What autograd saves all the same may wait for the backward in another `Memory` than the device's.

A norm, an activation function or a concatenation costs little to compute and much to store: autograd saves its result
only as the input of the next linear. The ledger knows such results by their storage. Where autograd would save one, it
saves a recipe: the function and its inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

SMALL = 2**20
"""Values with fewer elements are saved: recomputing them takes longer than their memory is worth."""


class Recipe(NamedTuple):
    """How to recompute a value: function(*inputs), without gradients."""

    function: Callable[..., Tensor]
    inputs: tuple
    """Tensors, placeholders of values that are themselves recomputed, and others."""

    def compute(self) -> Tensor:
        """The recomputed value, in its original shape."""
        with torch.no_grad():
            return self.function(*map(_unpack, self.inputs))


class Place(ABC):
    """The location of a saved tensor."""

    @abstractmethod
    def get(self) -> Tensor:
        """The tensor, in its original shape."""


class Memory(Protocol):
    """Storage of a block's saved tensors (`offload.py`)."""

    def put(self, tensor: Tensor) -> Tensor | Place:
        """The place of a tensor of any shape, or the tensor itself if it is kept where it is."""

    def close(self) -> None:
        """The block's forward has ended."""


_NOTE: ContextVar[Callable[[Tensor, Callable[..., Tensor], tuple], None] | None] = ContextVar("note", default=None)
"""`_Ledger.note` of the block that is computing, where its cheap values are recomputed."""


class _Entry(NamedTuple):
    storage: StorageWeakRef
    """While this is held, no other storage can have the same `cdata`, even after the value's memory is freed."""
    recipe: Recipe
    offset: int
    size: int
    version: int


class _Packed(NamedTuple):
    """Placeholder that autograd saves instead of a value."""

    recipe: Recipe
    shape: torch.Size


class _Ledger:
    """The cheap values of one block, by their storage."""

    def __init__(self, hooks: ExitStack, memory: Memory | None) -> None:
        self._hooks, self._memory = hooks, memory
        self._entries: dict[int, _Entry] = {}
        if memory is not None:
            self._start()

    def _start(self) -> None:
        self._hooks.enter_context(saved_tensors_hooks(self._pack, _unpack))

    def note(self, value: Tensor, function: Callable[..., Tensor], inputs: tuple) -> None:
        if value.numel() < SMALL or not value.requires_grad or not value.is_contiguous():
            return
        if not self._entries and self._memory is None:  # a block with small values needs no hooks
            self._start()
        recipe = Recipe(function, tuple(self._looked_up(x.detach()) if isinstance(x, Tensor) else x for x in inputs))
        storage = StorageWeakRef(value.untyped_storage())
        self._entries[storage.cdata] = _Entry(storage, recipe, value.storage_offset(), value.numel(), value._version)

    def clear(self) -> None:
        """Drops the entries: autograd holds the hooks, and so the ledger, which must not hold the inputs, too."""
        self._entries.clear()
        if self._memory is not None:
            self._memory.close()

    def _pack(self, tensor: Tensor) -> Tensor | Place | _Packed:
        return self._saved(self._looked_up(tensor))

    def _looked_up(self, tensor: Tensor) -> Tensor | _Packed:
        """The recipe of a tensor that is a cheap value, or the tensor itself."""
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        if entry is None or not _is_value(tensor, entry):
            return tensor
        return _Packed(entry.recipe, tensor.shape)

    def _saved(self, value: Any) -> Any:
        """A value as it is saved: tensors, of recipes too, where `memory` puts them."""
        if self._memory is None:
            return value
        if isinstance(value, _Packed):
            inputs = tuple(map(self._saved, value.recipe.inputs))
            return value._replace(recipe=value.recipe._replace(inputs=inputs))
        return self._memory.put(value) if isinstance(value, Tensor) else value


def _is_value(tensor: Tensor, entry: _Entry) -> bool:
    """Whether `tensor` is the whole value, in its order, and the value has not changed since it was noted."""
    found = (tensor.storage_offset(), tensor.numel(), tensor._version)
    return found == (entry.offset, entry.size, entry.version) and tensor.is_contiguous()


def _unpack(packed: Any) -> Any:
    if isinstance(packed, _Packed):
        return packed.recipe.compute().view(packed.shape)
    return packed.get() if isinstance(packed, Place) else packed


def cheap_values_recomputed(memory: Memory | None = None) -> AbstractContextManager[None]:
    """Context in which autograd saves recipes in place of the values of cheap functions, and everything else in
    `memory`: entered once for each block.

    It does nothing when compiling (a compiler plans its own memory), or without gradients.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return nullcontext()
    return _open_ledger(memory)


@contextmanager
def _open_ledger(memory: Memory | None) -> Iterator[None]:
    with ExitStack() as hooks:
        ledger = _Ledger(hooks, memory)
        token = _NOTE.set(ledger.note)
        try:
            yield
        finally:
            _NOTE.reset(token)
            ledger.clear()


def note(value: Tensor, function: Callable[..., Tensor], inputs: tuple) -> None:
    """Lets backward recompute `value` (of any shape) = function(*inputs), if a ledger is open and it saves enough
    memory.

    The function must be deterministic. Its inputs should be saved elsewhere anyway (usually by its own backward), and
    must not change in place before the backward: autograd does not check them here. A value that is not contiguous is
    saved, because autograd may save it with another memory order.
    """
    if (note_here := _NOTE.get()) is not None:
        note_here(value, function, inputs)


def cheap(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Marks a function whose results are cheaper to recompute than to save."""
    return partial(_noted, function)  # can be pickled with a network


def _noted(function: Callable[..., Tensor], *inputs) -> Tensor:
    value = function(*inputs)
    if not torch.compiler.is_compiling():
        note(value, function, inputs)
    return value


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """function(*inputs), saving only the inputs: everything is recomputed in backward.

    `function` must be deterministic.
    """

    def without_ledger(*inputs: Any) -> Any:
        token = _NOTE.set(None)  # everything is already computed twice
        try:
            return function(*inputs)
        finally:
            _NOTE.reset(token)

    return checkpoint(without_ledger, *inputs, use_reentrant=False, preserve_rng_state=False)
