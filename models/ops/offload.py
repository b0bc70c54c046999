"""Activation offloading: what a block saves for its backward is in host memory between the two.

    forward     each storage is copied to pinned memory on a stream of its own, beside the next block's computation
    backward    storages come back while the block behind computes its gradients (`fetch`), or at their first use

Results are those of the same tensors, with their strides, to the bit.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megadit.models.host_to_device import SideStream, pinned
from megadit.models.ops import ledger

_stream = cache(SideStream)
"""The stream of copies of a GPU."""


@dataclass(frozen=True, slots=True)
class _Place(ledger.Place):
    """A tensor in a block's `HostMemory`: the index of its storage there, and how the tensor lies in it."""

    memory: "HostMemory"
    index: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def get(self) -> Tensor:
        """The tensor on its device."""
        storage = self.memory.fetched()[self.index].untyped_storage()
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.shape, self.strides
        )


class HostMemory:
    """Host copies of what one block saves, each storage once. Small tensors stay, and those that others hold anyway."""

    def __init__(self, device: torch.device, held: Iterable[Tensor]) -> None:
        """`held` are parameters, buffers and inputs that all blocks share, of any shapes."""
        self._device = device
        self._held = {tensor.untyped_storage()._cdata for tensor in held}
        self._places: dict[tuple[int, int], tuple[StorageWeakRef, int]] = {}
        self._here: list[Tensor] = []
        self._there: list[Tensor] | None = None
        self._arrived: Callable[[], None] | None = None

    def put(self, tensor: Tensor) -> Tensor | _Place:
        """A tensor of any shape, which starts its way to the host; or the tensor itself, if it stays."""
        storage, base = tensor.untyped_storage(), tensor if tensor._base is None else tensor._base
        is_held = isinstance(base, nn.Parameter) or storage._cdata in self._held  # FSDP gathers its parameters again
        if is_held or tensor.numel() < ledger.SMALL or tensor.device != self._device:
            return tensor
        key = storage._cdata, tensor._version
        if key not in self._places:
            self._places[key] = StorageWeakRef(storage), self._sent(storage)
        _, index = self._places[key]
        return _Place(self, index, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def close(self) -> None:
        """End of the block's forward: other storages may take the places of those that were copied."""
        self._places.clear()

    def fetch(self) -> None:
        """Start to bring all of it back to the device."""
        if self._there is None:
            self._there = [torch.empty_like(here, device=self._device) for here in self._here]
            for there, here in zip(self._there, self._here, strict=True):
                _copy(there, here, self._device)
            self._arrived = _stream(self._device).arrival() if self._device.type == "cuda" else None
            self._here.clear()

    def fetched(self) -> list[Tensor]:
        """Bytes of all storages on the device, uint8 [n] each; the device waits for them, the host does not."""
        self.fetch()
        if self._arrived is not None:
            self._arrived()
            self._arrived = None
        return self._there

    def _sent(self, storage: torch.UntypedStorage) -> int:
        """Copy a storage to the host; returns its index."""
        there = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        here = pinned(len(there), self._device)
        _copy(here, there, self._device)
        self._here.append(here)
        return len(self._here) - 1


def fetch_before(x: Tensor, memory: HostMemory) -> None:
    """Bring a block's activations back when the gradient of `x`, of any shape, is known: `x` is the output of the block
    behind, which computes meanwhile."""
    if x.requires_grad:
        reference = weakref.ref(memory)  # the graph outlives its activations
        x.register_hook(lambda _: _fetch(reference()))


def _fetch(memory: HostMemory | None) -> None:
    if memory is not None:
        memory.fetch()


def _copy(into: Tensor, out_of: Tensor, device: torch.device) -> None:
    """Copy bytes, [n] -> [n], beside computation on a GPU."""
    if device.type != "cuda":
        into.copy_(out_of)
        return
    _stream(device).copy(into, out_of)
