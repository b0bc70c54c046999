"""How items are computed: with float32 for tensors that are created without a dtype, whatever torch's default is
(`torch.set_default_dtype`), and in a thread while the next item is prepared."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
_lock = threading.Lock()
_within: list[torch.dtype] = []
"""The previous defaults, one for each active context: the default is one of the process, not of a thread."""


def one_behind(
    function: Callable[[Item], Iterable[Result]], items: Iterable[Item], device: torch.device
) -> Iterator[list[Result]]:
    """All results of function(item), in order: a thread computes them while the next item is made.

    On a GPU the thread uses a separate stream, so items must be complete. An error while making an item is raised after
    the results of the items before it.
    """
    items = iter(items)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def compute(item: Item) -> list[Result]:
        with torch.cuda.stream(stream), float32_by_default():
            return list(function(item))

    with ThreadPoolExecutor(max_workers=1) as thread:
        last = None
        while True:
            try:
                item = next(items)
            except StopIteration:
                break
            except Exception:
                if last is not None:
                    yield last.result()
                raise
            found, last = last, thread.submit(compute, item)
            if found is not None:
                yield found.result()
        if last is not None:
            yield last.result()


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Context in which torch's default is float32; the last one to end restores what was before the first."""
    with _lock:
        _within.append(_within[0] if _within else torch.get_default_dtype())
        if torch.get_default_dtype() != torch.float32:
            torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        with _lock:
            before = _within.pop()
            if not _within and before != torch.float32:
                torch.set_default_dtype(before)


def each_in_float32(generator: Callable[..., Iterator[Item]]) -> Callable[..., Iterator[Item]]:
    """Decorates a generator whose items are each computed within `float32_by_default`; between items, the caller's
    default applies."""

    @wraps(generator)
    def made(*args: Any, **named: Any) -> Iterator[Item]:
        return _each(generator(*args, **named))

    return made


def _each(items: Iterator[Item]) -> Iterator[Item]:
    try:
        while True:
            with float32_by_default():
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
    finally:
        items.close()
