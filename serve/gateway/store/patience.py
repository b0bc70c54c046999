"""Deadline of a request for all of its store transactions together.

A backup, or an operator's client, may hold the store's lock for minutes; requests then get an error and can retry.
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
    """Remaining time of a request, shared by its threads."""

    seconds: float
    since: float | None = None
    """When the current transaction began; None between transactions."""

    def left(self) -> float:
        return self.seconds - (0.0 if self.since is None else time.monotonic() - self.since)


_PATIENCE: ContextVar[_Patience | None] = ContextVar("patience", default=None)
"""None outside of requests: job runners use the store's own timeouts."""


@contextmanager
def patient() -> Iterator[None]:
    """Limits transactions in the block, and in tasks that it starts, to `SECONDS` together."""
    token = _PATIENCE.set(_Patience(SECONDS))
    try:
        yield
    finally:
        _PATIENCE.reset(token)


def seconds_left(most: float) -> float:
    """Seconds that the next transaction may wait, at most `most`. Raises TimeoutError if no time is left."""
    patience = _PATIENCE.get()
    if patience is None:
        return most
    if patience.left() <= 0:
        raise TimeoutError("it did not respond within the time limit of a request")
    return min(most, patience.left())


def seconds_to_answer(most: float) -> float:
    """Timeout of a driver: one second more than the time left, within which the database itself gives up."""
    patience = _PATIENCE.get()
    return most if patience is None else min(most, max(0.0, patience.left()) + 1)


@contextmanager
def spending() -> Iterator[None]:
    """Charge the time of the block, including waits, to the deadline of its request. Raises TimeoutError if no time is
    left."""
    seconds_left(0)
    patience = _PATIENCE.get()
    if patience is None or patience.since is not None:  # another thread of the request counts already
        yield
        return
    patience.since = time.monotonic()
    try:
        yield
    finally:
        patience.seconds, patience.since = patience.left(), None
