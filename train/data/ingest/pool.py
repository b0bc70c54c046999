"""Pool of processes that maps over sources in order, and survives files that crash or hang a decoder."""

import ctypes
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from typing import Any, Generic, TypeVar

from megadit.models.shared.cli.command import cleaning_up
from megadit.models.shared.resources import available_cores
from megadit.train.data.ingest.memory import Memory, Written

Item = TypeVar("Item")
Result = TypeVar("Result")
AHEAD = 4
"""Maximum number of waiting results per process."""
MOST_AHEAD = 256
"""Maximum number of all, if there are fewer processes: each holds a file descriptor."""
SECONDS_BETWEEN_SIGNS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Time limits without a sign of life (`still_alive`), after which a process counts as hanging."""

    processor_seconds: float = 120.0
    """Limit of the process's CPU time, which does not depend on other load."""
    seconds: float = 3600.0
    """Limit of elapsed time, including waits for storage."""


_patience: Patience | None = None
"""Limits of this process; None outside of a pool."""
_read: Synchronized | None = None
"""Seconds of video that all processes of a pool have read."""


def still_alive() -> None:
    """Give a sign of life, regularly during long work.

    The kernel kills a process that gives none, because no Python code runs while a decoder hangs.
    """
    if _patience is not None:
        signal.setitimer(signal.ITIMER_PROF, _patience.processor_seconds)
        signal.setitimer(signal.ITIMER_REAL, _patience.seconds)


def have_read(seconds: float) -> None:
    """Report that `seconds` more of a video have been read."""
    if _read is not None:
        with _read.get_lock():
            _read.value += seconds


def _done() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _start(patience: Patience, read: Synchronized) -> None:
    """Initialize a worker, which ends with its parent (Linux: PR_SET_PDEATHSIG)."""
    global _patience, _read
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    for number in (signal.SIGPROF, signal.SIGALRM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # ends the process silently
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _patience, _read = patience, read


def _watched(function: Callable[[Item], Result], item: Item, memory: Memory) -> Written:
    still_alive()
    try:
        return memory.write(function(item))
    finally:
        _done()


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """Delay a signal to the end of the block; processes that begin there never get it, unless they ask for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True, slots=True)
class _Call(Generic[Item, Result]):
    """An item at work."""

    item: Item
    future: "Future[Written]"
    memory: Memory

    @property
    def is_lost(self) -> bool:
        """Whether its process has ended. Asked without a raise, whose traceback would keep the memory."""
        return isinstance(self.future.exception(), BrokenProcessPool)

    def result(self) -> Result:
        return self.memory.read(self.future.result())


def default_workers() -> int:
    return min(16, available_cores())


class Pool:
    """Processes for `map`; with `num_workers=0` the caller does all work, without protection."""

    def __init__(
        self,
        num_workers: int,
        patience: Patience = Patience(),  # noqa: B008  (it is frozen)
        while_waiting: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`while_waiting` is called every few seconds with the seconds of video that the processes have read."""
        self.num_workers = num_workers
        self.patience = patience
        self._while_waiting = while_waiting
        self._context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads and CUDA's state
        with _held_back(signal.SIGHUP):  # also later in the process that removes semaphores, which begins here
            self._read = self._context.Value("d", 0.0)
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Pool":
        self._signals = cleaning_up()
        self._signals.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._close()
        finally:
            self._signals.__exit__(*error)

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item], lost: Callable[[Item], Result]
    ) -> Iterator[Result]:
        """Yield function(item) for each item, in order; `lost(item)` if it crashes or hangs its process."""
        if self.num_workers == 0:
            yield from map(function, items)
            return
        watched = partial(_watched, function)
        ahead = max(self.num_workers, min(AHEAD * self.num_workers, MOST_AHEAD))
        waiting: deque[_Call[Item, Result]] = deque()
        for item in items:
            waiting.append(self._submit(watched, item))
            if len(waiting) >= ahead:
                yield self._result(watched, waiting, lost)
        while waiting:
            yield self._result(watched, waiting, lost)

    def _result(
        self,
        function: Callable[[Item, Memory], Written],
        waiting: "deque[_Call[Item, Result]]",
        lost: Callable[[Item], Result],
    ) -> Result:
        call = waiting.popleft()
        while not wait([call.future], SECONDS_BETWEEN_SIGNS).done:
            self._while_waiting(self._read.value)
        if not call.is_lost:
            return call.result()
        # All pending work was lost with the pool: do this item alone, and give the others to a new pool.
        self._close()
        self._executor = self._new_executor(1)
        alone = self._submit(function, call.item)
        result = lost(call.item) if alone.is_lost else alone.result()
        self._close()
        others = [other.item for other in waiting]
        waiting.clear()
        waiting.extend(self._submit(function, other) for other in others)
        return result

    def _submit(self, function: Callable[[Item, Memory], Written], item: Item) -> "_Call[Item, Result]":
        if self._executor is None:
            self._executor = self._new_executor(self.num_workers)
        memory = Memory()
        with _held_back(signal.SIGINT):  # processes that begin now can end without a traceback only later
            try:
                # the executor holds the memory until a process has answered: its descriptor names no other file
                return _Call(item, self._executor.submit(function, item, memory), memory)
            except BrokenProcessPool:
                broken: Future[Written] = Future()
                broken.set_exception(BrokenProcessPool())
                return _Call(item, broken, memory)

    def _new_executor(self, num_workers: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            num_workers, mp_context=self._context, initializer=_start, initargs=(self.patience, self._read)
        )

    def _close(self) -> None:
        if self._executor is not None:
            with _held_back(signal.SIGINT):  # one in the callback of a weak reference would be lost, with a traceback
                self._executor.shutdown(wait=True, cancel_futures=True)
                self._executor = None
