"""Processes items in a thread while the next item is prepared."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from megadit.models.default_dtype import float32_by_default

Item = TypeVar("Item")
Result = TypeVar("Result")


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
