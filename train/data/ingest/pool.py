"""Work on many sources in several processes, in order, that survives files which crash a decoder."""

import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
AHEAD = 4
"""Results that may wait for each process."""


def _die_with_parent() -> None:
    """A killed preparation must not leave its workers behind (Linux: PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def default_workers() -> int:
    return min(16, len(os.sched_getaffinity(0)))


def _executor(num_workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads and CUDA's state
    return ProcessPoolExecutor(num_workers, mp_context=context, initializer=_die_with_parent)


class Pool:
    """Processes for `map`; none with `num_workers=0`, where all work is done by the caller."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item], crashed: Callable[[Item], Result]
    ) -> Iterator[Result]:
        """function(item) of each item, in order; `crashed(item)` for one that takes its process with it."""
        if self.num_workers == 0:
            yield from map(function, items)
            return
        waiting: deque[tuple[Item, Future[Result]]] = deque()
        for item in items:
            waiting.append((item, self._submit(function, item)))
            if len(waiting) >= AHEAD * self.num_workers:
                yield self._result(function, waiting, crashed)
        while waiting:
            yield self._result(function, waiting, crashed)

    def _result(
        self,
        function: Callable[[Item], Result],
        waiting: deque[tuple[Item, Future[Result]]],
        crashed: Callable[[Item], Result],
    ) -> Result:
        item, future = waiting.popleft()
        try:
            return future.result()
        except BrokenProcessPool:
            pass
        # Everything under way was lost with the pool: do this one alone, and give the others to a new pool.
        self._close()
        try:
            with _executor(1) as alone:
                result = alone.submit(function, item).result()
        except BrokenProcessPool:
            result = crashed(item)
        others = [other for other, _ in waiting]
        waiting.clear()
        waiting.extend((other, self._submit(function, other)) for other in others)
        return result

    def _submit(self, function: Callable[[Item], Result], item: Item) -> "Future[Result]":
        if self._executor is None:
            self._executor = _executor(self.num_workers)
        try:
            return self._executor.submit(function, item)
        except BrokenProcessPool as error:
            broken: Future[Result] = Future()
            broken.set_exception(error)
            return broken

    def _close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None
