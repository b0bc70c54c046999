"""Work on many sources in several processes, in order, that survives files which crash a decoder or hang it."""

import ctypes
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from typing import TypeVar

from megadit.models.shared.cores import available_cores

Item = TypeVar("Item")
Result = TypeVar("Result")
AHEAD = 4
"""Results that may wait for each process."""
SECONDS_BETWEEN_SIGNS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a process may work without a sign of life (`still_alive`) before it counts as hanging."""

    processor_seconds: float = 120.0
    """Limit of the process's own processor time, which a busy machine does not use up."""
    seconds: float = 3600.0
    """Limit of elapsed time, with waits for storage that does not answer."""


_patience: Patience | None = None
"""Limits of this process; None where nobody would notice its end."""
_read: Synchronized | None = None
"""Seconds of video that all processes of a pool have read."""


def still_alive() -> None:
    """Report a sign of life, as long work does for every piece that it has done.

    The kernel ends a process that gives none: no Python runs while a decoder does not return.
    """
    if _patience is not None:
        signal.setitimer(signal.ITIMER_PROF, _patience.processor_seconds)
        signal.setitimer(signal.ITIMER_REAL, _patience.seconds)


def have_read(seconds: float) -> None:
    """Tells who waits for this process how much more of a video it has read."""
    if _read is not None:
        with _read.get_lock():
            _read.value += seconds


def _done() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _start(patience: Patience, read: Synchronized) -> None:
    """A killed preparation must not leave its workers behind (Linux: PR_SET_PDEATHSIG)."""
    global _patience, _read
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    for number in (signal.SIGPROF, signal.SIGALRM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # which ends the process, without a word
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _patience, _read = patience, read


def _watched(function: Callable[[Item], Result], item: Item) -> Result:
    still_alive()
    try:
        return function(item)
    finally:
        _done()


def default_workers() -> int:
    return min(16, available_cores())


class Pool:
    """Processes for `map`; none with `num_workers=0`, where the caller does all work, and crashes and hangs with it."""

    def __init__(
        self,
        num_workers: int,
        patience: Patience = Patience(),  # noqa: B008  (it is frozen)
        while_waiting: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`while_waiting` is called every few seconds with how much video its processes have read."""
        self.num_workers = num_workers
        self.patience = patience
        self._while_waiting = while_waiting
        self._context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads and CUDA's state
        self._read = self._context.Value("d", 0.0)
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item], lost: Callable[[Item], Result]
    ) -> Iterator[Result]:
        """function(item) of each item, in order; `lost(item)` for one that crashes its process, or hangs it."""
        if self.num_workers == 0:
            yield from map(function, items)
            return
        watched = partial(_watched, function)
        waiting: deque[tuple[Item, Future[Result]]] = deque()
        for item in items:
            waiting.append((item, self._submit(watched, item)))
            if len(waiting) >= AHEAD * self.num_workers:
                yield self._result(watched, waiting, lost)
        while waiting:
            yield self._result(watched, waiting, lost)

    def _result(
        self,
        function: Callable[[Item], Result],
        waiting: deque[tuple[Item, Future[Result]]],
        lost: Callable[[Item], Result],
    ) -> Result:
        item, future = waiting.popleft()
        try:
            while not wait([future], SECONDS_BETWEEN_SIGNS).done:
                self._while_waiting(self._read.value)
            return future.result()
        except BrokenProcessPool:
            pass
        # Everything under way was lost with the pool: do this one alone, and give the others to a new pool.
        self._close()
        try:
            with self._new_executor(1) as alone:
                result = alone.submit(function, item).result()
        except BrokenProcessPool:
            result = lost(item)
        others = [other for other, _ in waiting]
        waiting.clear()
        waiting.extend((other, self._submit(function, other)) for other in others)
        return result

    def _submit(self, function: Callable[[Item], Result], item: Item) -> "Future[Result]":
        if self._executor is None:
            self._executor = self._new_executor(self.num_workers)
        # processes that begin now see a Ctrl-C only once they can end without a traceback
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._executor.submit(function, item)
        except BrokenProcessPool as error:
            broken: Future[Result] = Future()
            broken.set_exception(error)
            return broken
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _new_executor(self, num_workers: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            num_workers, mp_context=self._context, initializer=_start, initargs=(self.patience, self._read)
        )

    def _close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None
