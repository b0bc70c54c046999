"""How long a request waits for the store: so long in all, however many questions it asks.

A backup, or an operator's own client, may hold the store's lock for minutes; who asks is told to ask again.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from sqlalchemy.exc import TimeoutError

SECONDS = 5.0


@dataclass(slots=True)
class _Patience:
    """Shared by the threads that one request runs in."""

    seconds: float
    since: float | None = None
    """When the transaction began that takes some of them now."""

    def left(self) -> float:
        return self.seconds - (0.0 if self.since is None else time.monotonic() - self.since)


_PATIENCE: ContextVar[_Patience | None] = ContextVar("patience", default=None)
"""None outside of requests: who runs jobs waits for as long as the store says."""


@contextmanager
def patient() -> Iterator[None]:
    """Within the block, and in what it starts, transactions take `SECONDS` together."""
    token = _PATIENCE.set(_Patience(SECONDS))
    try:
        yield
    finally:
        _PATIENCE.reset(token)


def seconds_left(most: float) -> float:
    """How long the next transaction may wait, at most.

    Raises:
        TimeoutError: if nothing is left.
    """
    patience = _PATIENCE.get()
    if patience is None:
        return most
    if patience.left() <= 0:
        raise TimeoutError("it has not answered for as long as a request waits")
    return min(most, patience.left())


def seconds_to_answer(most: float) -> float:
    """How long a driver waits for an answer: a second more than what is left, within which the database gives up."""
    patience = _PATIENCE.get()
    return most if patience is None else min(most, max(0.0, patience.left()) + 1)


@contextmanager
def spending() -> Iterator[None]:
    """Charge the time of the block, waits included, to the deadline of the request that it is part of.

    Raises:
        TimeoutError: if nothing is left.
    """
    seconds_left(0)
    patience = _PATIENCE.get()
    if patience is None or patience.since is not None:  # another of its threads counts already
        yield
        return
    patience.since = time.monotonic()
    try:
        yield
    finally:
        patience.seconds, patience.since = patience.left(), None
