"""Small tensors from the CPU to a GPU, many by one copy that nobody waits for.

A copy from ordinary memory stops the host until the GPU has done all that it was told before. Memory that is pinned is
copied in its turn, while the host goes on; torch gives it to others only when the copy is done. On a `SideStream` it is
copied beside what the GPU computes meanwhile.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from megadit.models.cache import memo_key

Tree = TypeVar("Tree")

_ALIGNMENT = 64
"""Bytes: every tensor begins where kernels may read it at full speed."""


Copy = Callable[[Tensor, Tensor], None]
"""(there, here): copies from pinned memory to as many bytes on a device."""


def copy_in_turn(there: Tensor, here: Tensor) -> None:
    """Copy bytes, [n] -> [n], on the current stream."""
    there.copy_(here, non_blocking=True)


class SideStream:
    """A GPU's stream for copies that no kernel waits for but those that read what was copied."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def copy(self, there: Tensor, here: Tensor) -> None:
        """`copy_in_turn`, on this stream: of bytes, [n] -> [n]."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # whatever had this memory is done with it
        with torch.cuda.stream(self._stream):
            copy_in_turn(there, here)

    def arrival(self) -> Callable[[], None]:
        """Makes the current stream wait for all that has been copied until now; the host waits for nothing."""
        copied = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(copied)


def sent_together(tensors: Sequence[Tensor], device: torch.device | str, copy: Copy = copy_in_turn) -> list[Tensor]:
    """The same tensors, of any shapes and types, on another device; those that are there, themselves.

    Those of the CPU share one block of memory, which lives as long as any of them.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return [tensor.to(device) for tensor in tensors]
    sent = iter(_sent_in_one_block([tensor for tensor in tensors if tensor.is_cpu], device, copy))
    return [next(sent) if tensor.is_cpu else tensor.to(device) for tensor in tensors]


def _sent_in_one_block(tensors: Sequence[Tensor], device: torch.device, copy: Copy) -> list[Tensor]:
    if not tensors:
        return []
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    block = pinned(sum(sizes), device)
    for tensor, part in zip(tensors, _unpacked(block, sizes, tensors), strict=True):
        part.copy_(tensor)
    there = torch.empty(len(block), dtype=block.dtype, device=device)
    copy(there, block)
    return _unpacked(there, sizes, tensors)


def pinned(size: int, device: torch.device) -> Tensor:
    """Memory of the host from which a GPU copies by itself, uint8 [size]."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda" and torch.cuda.is_available())


def sent_as_one(tree: Tree, device: torch.device | str, copy: Copy = copy_in_turn) -> Tree:
    """Copy all tensors in nested tuples, lists and dictionaries to another device, with `sent_together`."""
    leaves, form = tree_flatten(tree)
    sent = iter(sent_together([leaf for leaf in leaves if isinstance(leaf, Tensor)], device, copy))
    return tree_unflatten([next(sent) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)


Numbers = float | tuple["Numbers", ...]


def constant(numbers: Numbers, device: torch.device) -> Tensor:
    """Numbers that are read again and again, of any shape; sent to a device once."""
    return torch.tensor(numbers) if device.type == "cpu" else _sent_constant(numbers, device)


@lru_cache(maxsize=256)
def _sent_constant(numbers: Numbers, device: torch.device) -> Tensor:
    return sent_together([torch.tensor(numbers)], device)[0]


def levels_on(level_B: Tensor, device: torch.device) -> Tensor:
    """The same noise levels, [B], on a device; of one that all of a batch are at nothing is sent there."""
    if level_B.device == device or not level_B.is_cpu:
        return level_B.to(device)
    level = level_B[0].item()
    if (level_B == level).all():
        return torch.full(level_B.shape, level, dtype=level_B.dtype, device=device)
    return sent_together([level_B], device)[0]


class Keeper(Protocol):
    """An object that caches the values computed from it: a layout."""

    sent: dict[tuple[torch.device, Hashable], Any]
    """Values that are on other devices already."""

    def memo(self, function: Callable[..., Any], *args: Hashable) -> Any: ...

    def keep(self, device: torch.device, key: Hashable, there: Any) -> None:
        """Store a value that has arrived on `device` in `sent`."""


class Need(NamedTuple):
    """compute(layout, *args): tensors that are made on the CPU and read on another device."""

    layout: Keeper
    compute: Callable[..., Any]
    args: tuple[Hashable, ...] = ()

    def on(self, device: torch.device) -> Any:
        """Return the computed value on a device; it is copied there once."""
        if device.type == "cpu":
            return self.layout.memo(self.compute, *self.args)
        if (device, self.key) not in self.layout.sent:
            send_with([self], (), device)
        return self.layout.sent[device, self.key]

    @property
    def key(self) -> Hashable:
        return memo_key(self.compute, self.args)


def send_with(needs: Sequence[Need], tree: Tree, device: torch.device, copy: Copy = copy_in_turn) -> Tree:
    """The tensors of `tree` on a device, by one copy with all that is needed there.

    On the CPU nothing is copied, and what is needed is computed at its first use.
    """
    if device.type == "cpu":
        return tree
    tree, found = sent_as_one((tree, [need.layout.memo(need.compute, *need.args) for need in needs]), device, copy)
    for need, there in zip(needs, found, strict=True):
        need.layout.keep(device, need.key, there)
    return tree


def _unpacked(block: Tensor, sizes: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """A block's bytes as tensors of the shapes and types of `like`."""
    slices = zip(block.split(list(sizes)), like, strict=True)
    return [slice_[: prod(x.shape) * x.itemsize].view(x.dtype).view(x.shape) for slice_, x in slices]
