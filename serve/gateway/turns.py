"""So much work at once, and so much of it of each key, so that no key holds the others up."""

import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from megadit.serve.gateway.errors import ApiError

_ANY_NUMBER = 1 << 30


class Turns:
    """Keys take turns: the next piece of a key waits behind the pieces of every other key. Waiting holds no thread."""

    def __init__(
        self, at_once: int = _ANY_NUMBER, *, of_a_key: int = 1, waiting: int = _ANY_NUMBER, rest: float = 0.0
    ) -> None:
        """`of_a_key`: pieces of a key at once; `waiting`: pieces of a key that wait or run.

        The next piece of a key begins `rest` times as long after the last as that took: for work that holds the
        interpreter's lock.
        """
        self._all = anyio.Semaphore(at_once)
        self._of_a_key, self._waiting, self._rest = of_a_key, waiting, rest
        self._own: dict[str, anyio.Semaphore] = {}
        self._count: Counter[str] = Counter()
        """Pieces of a key that wait or run."""
        self._earliest: dict[str, float] = {}
        """When the next piece of a key may begin."""

    @asynccontextmanager
    async def of(self, key: str) -> AsyncIterator[None]:
        """Context in which it is the turn of this key.

        Raises:
            ApiError: if too many of its pieces wait already.
        """
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
