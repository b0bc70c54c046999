"""What the host sends to a device, and what it asks of it, counted; the meta device, which computes nothing, stands for
a GPU.

Of numbers that are no tensor (`torch.tensor(numbers, device=...)`, an index that is a list) a meta tensor is made at
once, where a GPU waits for a copy: functions that take such numbers are wrapped. A TorchFunctionMode would see them,
too, but is off while a backward runs.
"""

import linecache
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megadit.models import host_to_device as transfer

_ASKING = ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
"""Methods of tensors that tell their numbers."""
_MAKING = ((torch, "tensor", 0), (torch, "as_tensor", 0), (torch, "asarray", 0), (Tensor, "new_tensor", 1))
"""What makes tensors of numbers, and as which of its arguments it takes them."""
_INDEXING = ("__getitem__", "__setitem__")
_ATEN = torch.ops.aten
_MOVING = {_ATEN._to_copy, _ATEN.copy_, _ATEN.where, _ATEN.index_put, _ATEN.index_put_}
"""Operations that copy even a single number of the CPU; for others it travels with the launch of their kernel."""
_NOT_OURS = ("site-packages", "/lib/python", __file__, "cpu_shim.py")


def ones(asked: Tensor) -> Tensor:
    """Stands for the numbers of a tensor without any."""
    return torch.ones(asked.shape, dtype=asked.dtype, device="cpu")


def note_waits(monkeypatch: Any, note: Callable[[int], None]) -> None:
    """Calls `note` where the host waits for an event of the current stream, with the number of the event."""
    numbers = count()

    def record_event(event: Any) -> SimpleNamespace:
        return SimpleNamespace(synchronize=partial(note, next(numbers)))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=record_event))
    monkeypatch.setattr(torch.cuda, "Event", lambda *, blocking: None)


class Traffic(TorchDispatchMode):
    """Counts, by the line of ours that does it, what goes to the device (`sent`), what comes back into pinned memory
    (`fetched`), and what the host waits for (`asked`): numbers, and copies that are not of pinned memory."""

    def __init__(self, answer: Callable[[Tensor], Tensor] = ones) -> None:
        """`answer` gives what the host gets where it asks for a tensor's numbers."""
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.sent_bytes = 0
        self.fetched: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self._answer = answer
        self._pinned: dict[int, Tensor] = {}
        self._wrapped = ExitStack()

    def forget(self) -> None:
        """Counts from now on."""
        self.sent.clear()
        self.sent_bytes = 0
        self.fetched.clear()
        self.asked.clear()

    def __enter__(self) -> "Traffic":
        for name in _ASKING:
            self._wrap(Tensor, name, self._asking)
        for place, name, argument in _MAKING:
            self._wrap(place, name, partial(self._making, argument))
        for name in _INDEXING:
            self._wrap(Tensor, name, self._indexing)
        self._wrap(transfer, "pinned", self._pinning)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._wrapped.close()

    def _wrap(self, place: Any, name: str, wrapper: Callable) -> None:
        self._wrapped.enter_context(mock.patch.object(place, name, wrapper(getattr(place, name))))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = _tensors((args, kwargs))
        if function is _ATEN.copy_.default and args[0].is_cpu and _is_there(args[1]):
            goes_on = True in args[2:] and self._is_pinned(args[0])
            (self.fetched if goes_on else self.asked)[_line()] += 1
            return args[0].copy_(self._answer(args[1]))
        out = function(*args, **kwargs or {})
        is_moving = function.overloadpacket in _MOVING
        sent = [x for x in given if x.is_cpu and (x.ndim or is_moving)]
        if sent and any(map(_is_there, [*_tensors(out), *given])):
            goes_on = (kwargs or {}).get("non_blocking") or (function is _ATEN.copy_.default and True in args[2:])
            self.sent_bytes += sum(x.nbytes for x in sent)
            self._note_sent(is_waited_for=not (goes_on and all(map(self._is_pinned, sent))))
        return out

    def _note_sent(self, *, is_waited_for: bool) -> None:
        self.sent[_line()] += 1
        if is_waited_for:
            self.asked[f"a copy that is waited for, {_line()}"] += 1

    def _pinning(self, pinned: Callable) -> Callable:
        """A CPU alone pins no memory: notes what would be."""

        @wraps(pinned)
        def pins(*args: Any) -> Tensor:
            block = pinned(*args)
            self._pinned[block.untyped_storage().data_ptr()] = block  # kept: no other tensor gets its place
            return block

        return pins

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _asking(self, method: Callable) -> Callable:
        @wraps(method)
        def asks(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not _is_there(tensor):
                return method(tensor, *args, **kwargs)
            self.asked[_line()] += 1
            return method(self._answer(tensor), *args, **kwargs)

        return asks

    def _making(self, argument: int, function: Callable) -> Callable:
        @wraps(function)
        def makes(*args: Any, **kwargs: Any) -> Tensor:
            before = self.sent.total()
            made = function(*args, **kwargs)
            self._note_numbers(before, _is_there(made) and not _is_there(args[argument]))
            return made

        return makes

    def _indexing(self, method: Callable) -> Callable:
        @wraps(method)
        def indexes(tensor: Tensor, index: Any, *args: Any) -> Any:
            before = self.sent.total()
            out = method(tensor, index, *args)
            parts = index if isinstance(index, tuple) else (index,)
            has_numbers = any(isinstance(part, list | numpy.ndarray) for part in parts)
            self._note_numbers(before, _is_there(tensor) and has_numbers)
            return out

        return indexes

    def _note_numbers(self, before: int, are_sent: bool) -> None:
        """Notes numbers that no operation has sent since `before`: tensors and arrays are seen there."""
        if are_sent and self.sent.total() == before:
            self._note_sent(is_waited_for=True)


def _is_there(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_meta


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _line() -> str:
    """The line of ours that sends or asks."""
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _NOT_OURS):
            return f"{name.rpartition('/')[2]}: {linecache.getline(name, frame.f_lineno).strip()}"
        frame = frame.f_back
    return "no line of ours"
