"""Fair scheduling of work among keys, with limits in total and for each key."""

import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from megadit.serve.gateway.errors import ApiError

_ANY_NUMBER = 1 << 30


class Turns:
    """Keys take turns: the next task of a key waits behind those of every other key. Waiting holds no thread."""

    def __init__(
        self, at_once: int = _ANY_NUMBER, *, of_a_key: int = 1, waiting: int = _ANY_NUMBER, rest: float = 0.0
    ) -> None:
        """`of_a_key`: tasks of a key at once; `waiting`: tasks of a key that wait or run.

        After a task, a key pauses for `rest` times the task's duration: for work that holds the interpreter's lock.
        """
        self._all = anyio.Semaphore(at_once)
        self._of_a_key, self._waiting, self._rest = of_a_key, waiting, rest
        self._own: dict[str, anyio.Semaphore] = {}
        self._count: Counter[str] = Counter()
        """Key -> its tasks that wait or run."""
        self._earliest: dict[str, float] = {}
        """Key -> time when its next task may begin."""

    @asynccontextmanager
    async def of(self, key: str) -> AsyncIterator[None]:
        """Context in which it is the turn of this key. Raises ApiError if too many of its tasks wait already."""
        if self._count[key] >= self._waiting:
            message = f"{self._waiting} requests of this key wait to be read"
            raise ApiError(429, "too_many_uploads", message, retry_after=2)
        self._count[key] += 1
        own = self._own.setdefault(key, anyio.Semaphore(self._of_a_key))
        try:
            async with own:
                await anyio.sleep(max(0.0, self._earliest.get(key, 0.0) - time.monotonic()))
                async with self._all:
                    began = time.monotonic()
                    try:
                        yield
                    finally:
                        if self._rest:
                            self._earliest[key] = (now := time.monotonic()) + self._rest * (now - began)
        finally:
            self._count[key] -= 1
            if not self._count[key]:
                del self._count[key], self._own[key]
