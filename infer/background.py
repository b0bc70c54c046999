"""Work that a thread does while the next piece of work is prepared."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def one_behind(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """function(item) of each item, in order: a thread computes it while the next item is made.

    An error in making an item is raised after the results of those before it.
    """
    items = iter(items)
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
            found, last = last, thread.submit(function, item)
            if found is not None:
                yield found.result()
        if last is not None:
            yield last.result()
