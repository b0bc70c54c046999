"""Asynchronous copies: of tensors from the CPU to a GPU and back, many by one copy; of large ones back, in pieces.

A copy from pageable memory stops the host until the GPU has done all queued work. Pinned memory is copied in stream
order, while the host goes on; torch reuses it only after the copy. On a `SideStream`, copies overlap with
computation.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

Tree = TypeVar("Tree")

_ALIGNMENT = 64
"""Alignment in bytes at which kernels read tensors at full speed."""


Copy = Callable[[Tensor, Tensor], None]
"""Copies bytes from pinned memory (second argument) to a device (first argument), or the other way."""


def copy_in_turn(there: Tensor, here: Tensor) -> None:
    """Copy bytes, [n] -> [n], on the current stream."""
    there.copy_(here, non_blocking=True)


class SideStream:
    """A CUDA stream for copies; only kernels that read the copied tensors wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def copy(self, there: Tensor, here: Tensor) -> None:
        """`copy_in_turn`, on this stream: bytes, [n] -> [n]."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # earlier users of this memory are done
        with torch.cuda.stream(self._stream):
            copy_in_turn(there, here)
        for tensor in (there, here):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)  # its memory is not reused before the copy is done

    def arrival(self) -> Callable[[], None]:
        """A function that makes the current stream wait for all copies so far; the host does not wait."""
        copied = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(copied)


COPIED_AT_ONCE = 2**26
"""Bytes of a pinned block of `HostCopies`."""


class HostCopies:
    """Copies large tensors from a GPU to pageable host memory, through two pinned blocks: one is filled on a stream of
    its own while the other is emptied. A copy straight to pageable memory goes through a small block of the driver's
    own, and nothing overlaps."""

    def __init__(self, device: torch.device, block_bytes: int = COPIED_AT_ONCE) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._free = [pinned(block_bytes, device) for _ in range(2)]
        self._filling: deque[tuple[torch.cuda.Event, Tensor, Tensor]] = deque()

    def copy(self, tensor: Tensor) -> Tensor:
        """A tensor of any shape in host memory, whose numbers are there after `finish`."""
        here, there = torch.empty(tensor.shape, dtype=tensor.dtype), tensor.contiguous()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        size = len(self._free[0] if self._free else self._filling[0][1])
        for filled, read in zip(_as_bytes(here).split(size), _as_bytes(there).split(size), strict=True):
            if not self._free:
                self._empty_oldest()
            block = self._free.pop()
            with torch.cuda.stream(self._stream):
                block[: len(read)].copy_(read, non_blocking=True)
                self._filling.append((self._stream.record_event(), block, filled))
        there.record_stream(self._stream)
        return here

    def finish(self) -> None:
        """Wait for all copies; until then tensors on the GPU must not change."""
        while self._filling:
            self._empty_oldest()

    def _empty_oldest(self) -> None:
        event, block, filled = self._filling.popleft()
        event.synchronize()
        filled.copy_(block[: len(filled)])
        self._free.append(block)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def sent_together(tensors: Sequence[Tensor], device: torch.device | str, copy: Copy = copy_in_turn) -> list[Tensor]:
    """The same tensors, of any shapes and types, on another device; tensors that are already there are returned as is.

    Tensors from the CPU share one block of memory, which lives as long as any of them.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return [tensor.to(device) for tensor in tensors]
    sent = iter(_sent_in_one_block([tensor for tensor in tensors if tensor.is_cpu], device, copy))
    return [next(sent) if tensor.is_cpu else tensor.to(device) for tensor in tensors]


def _sent_in_one_block(tensors: Sequence[Tensor], device: torch.device, copy: Copy) -> list[Tensor]:
    if not tensors:
        return []
    block = pinned(block_bytes(tensors), device)
    for tensor, part in zip(tensors, unpacked(block, tensors), strict=True):
        part.copy_(tensor)
    there = torch.empty(len(block), dtype=block.dtype, device=device)
    copy(there, block)
    return unpacked(there, tensors)


def pinned(size: int, device: torch.device) -> Tensor:
    """Pinned host memory, uint8 [size]."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda" and torch.cuda.is_available())


def fetch_together(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Start to copy tensors of one device, of any shapes and types, to the CPU, by one copy through pinned memory.

    The function returned waits for that copy alone, and returns the tensors; those of the CPU as they are.
    """
    device = tensors[0].device
    if device.type == "cpu":
        return lambda: list(tensors)
    there = torch.empty(block_bytes(tensors), dtype=torch.uint8, device=device)
    for tensor, part in zip(tensors, unpacked(there, tensors), strict=True):
        part.copy_(tensor)
    block = pinned(len(there), device)
    copy_in_turn(block, there)
    copied = torch.cuda.current_stream(device).record_event(torch.cuda.Event(blocking=True))

    def fetched() -> list[Tensor]:
        copied.synchronize()
        return [part.clone() for part in unpacked(block, tensors)]

    return fetched


def sent_as_one(tree: Tree, device: torch.device | str, copy: Copy = copy_in_turn) -> Tree:
    """Copy all tensors in nested tuples, lists and dictionaries to another device, with `sent_together`."""
    leaves, form = tree_flatten(tree)
    sent = iter(sent_together([leaf for leaf in leaves if isinstance(leaf, Tensor)], device, copy))
    return tree_unflatten([next(sent) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)


Numbers = float | tuple["Numbers", ...]


def constant(numbers: Numbers, device: torch.device) -> Tensor:
    """Constant numbers, of any shape, as a tensor that is copied to a device once."""
    return torch.tensor(numbers) if device.type == "cpu" else _sent_constant(numbers, device)


@lru_cache(maxsize=256)
def _sent_constant(numbers: Numbers, device: torch.device) -> Tensor:
    return sent_together([torch.tensor(numbers)], device)[0]


def levels_on(level_B: Tensor, device: torch.device) -> Tensor:
    """Noise levels [B] on a device; without a copy if the whole batch has the same level."""
    if level_B.device == device or not level_B.is_cpu:
        return level_B.to(device)
    level = level_B[0].item()
    if (level_B == level).all():
        return torch.full(level_B.shape, level, dtype=level_B.dtype, device=device)
    return sent_together([level_B], device)[0]


def memo_key(function: Callable[..., Any], args: tuple[Hashable, ...]) -> Hashable:
    """(function, args, types of args), a key that is different for different values.

    Raises:
        TypeError: for a function that may capture variables, and for arguments that are not hashable or
            compared by identity.
    """
    name = getattr(function, "__qualname__", "<unnamed>")
    if "<" in name:
        raise TypeError(f"{name} cannot be a key: give a function of the module or class, and its arguments")
    if any(isinstance(arg, Tensor) for arg in args):
        raise TypeError(f"a tensor cannot be a key of {name}: tensors are compared by identity")
    hash(args)
    return function, args, tuple(map(type, args))  # 1 == 1.0 == True


class Keeper(Protocol):
    """An object that caches the values computed from it: a layout."""

    sent: dict[tuple[torch.device, Hashable], Any]
    """Cached values on other devices."""

    def memo(self, function: Callable[..., Any], *args: Hashable) -> Any: ...

    def keep(self, device: torch.device, key: Hashable, there: Any) -> None:
        """Store in `sent` a value that has arrived on `device`."""


class Need(NamedTuple):
    """compute(layout, *args): tensors that are computed on the CPU and read on another device."""

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
    """The tensors of `tree` on a device, in one copy with the values of `needs`.

    On the CPU nothing is copied, and the values are computed at their first use.
    """
    if device.type == "cpu":
        return tree
    tree, found = sent_as_one((tree, [need.layout.memo(need.compute, *need.args) for need in needs]), device, copy)
    for need, there in zip(needs, found, strict=True):
        need.layout.keep(device, need.key, there)
    return tree


def block_bytes(like: Sequence[Tensor]) -> int:
    """Size of a block for tensors of any shapes and types."""
    return sum(map(_aligned_bytes, like))


def unpacked(block: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A block's bytes, uint8 [block_bytes(like)], as tensors of the shapes and types of `like`."""
    slices = zip(block.split(list(map(_aligned_bytes, like))), like, strict=True)
    return [slice_[: prod(x.shape) * x.itemsize].view(x.dtype).view(x.shape) for slice_, x in slices]


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
