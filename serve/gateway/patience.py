"""Time that a request waits for the store: so long in all, however many questions it asks.

A backup, or an operator's own client, may hold the store's lock for minutes; who asks is told to ask again.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from sqlalchemy import Connection
from sqlalchemy.exc import TimeoutError

SECONDS = 5.0


@dataclass(slots=True)
class _Patience:
    """Shared by the threads that one request runs in."""

    seconds: float


_PATIENCE: ContextVar[_Patience | None] = ContextVar("patience", default=None)
"""None outside of requests: who runs jobs waits for as long as the store says."""


@contextmanager
def patient() -> Iterator[None]:
    """Context in which transactions, also those of what it starts, take `SECONDS` together."""
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
    if patience.seconds <= 0:
        raise TimeoutError("it has not answered for as long as a request waits")
    return min(most, patience.seconds)


def began(connection: Connection) -> None:
    connection.info["began"] = time.monotonic()


def ended(connection: Connection) -> None:
    """Take the time of a transaction from the request that it was part of."""
    if (began := connection.info.pop("began", None)) is not None:
        spend(time.monotonic() - began)


def spend(seconds: float) -> None:
    if (patience := _PATIENCE.get()) is not None:
        patience.seconds -= seconds
