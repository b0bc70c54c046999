"""Work that takes a core: so much of it at once, and one piece of each key, so that no key holds the others up."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from megadit.serve.gateway.errors import ApiError
from megadit.serve.gateway.keys import Key


class Turns:
    """Keys take turns: the next piece of a key waits behind one piece of every other key. Waiting holds no thread."""

    def __init__(self, at_once: int, *, most_of_a_key: int) -> None:
        self._all = anyio.CapacityLimiter(at_once)
        self._most_of_a_key = most_of_a_key
        self._own: dict[str, anyio.Lock] = {}
        self._count: Counter[str] = Counter()
        """Pieces of a key that wait or run."""

    @asynccontextmanager
    async def of(self, key: Key) -> AsyncIterator[None]:
        """Context in which it is the turn of this key.

        Raises:
            ApiError: if so many of its requests wait already.
        """
        if self._count[key.id] >= self._most_of_a_key:
            message = f"{self._most_of_a_key} requests of this key wait to be read"
            raise ApiError(429, "too_many_uploads", message, retry_after=2)
        self._count[key.id] += 1
        own = self._own.setdefault(key.id, anyio.Lock())
        try:
            async with own, self._all:
                yield
        finally:
            self._count[key.id] -= 1
            if not self._count[key.id]:
                del self._count[key.id], self._own[key.id]
