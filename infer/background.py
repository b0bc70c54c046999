"""Work that a thread does while the next piece of work is prepared."""

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
    """All results of function(item), of each item in order: a thread computes them while the next item is made.

    On a GPU it does so in a stream of its own: items must be complete. An error in making an item is raised after the
    results of those before it.
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
