"""Limits of a gateway's connections in number and time: idle and unread ones are closed for others.

Every connection is a file descriptor. gRPC, which is used for Triton, aborts a process without free descriptors.
"""

import asyncio
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import DEFAULT_MAX_INCOMPLETE_EVENT_SIZE, H11Protocol

from megadit.models.shared.errors import UserError
from megadit.models.shared.resources import raise_descriptor_limit

_SECONDS_TO_ASK = 10.0
"""Seconds from the start of a connection, or the end of a response, to the complete head of the next request."""
_SECONDS_TO_READ = 10.0
"""Seconds in which a client reads nothing of a response, after which its connection makes room for others."""
_OF_OURS = 512
"""Descriptors of the store, the log, the metrics and connections that wait to be accepted."""
_OF_A_SLOT = 8
"""Descriptors of a job at Triton."""
_FEWEST = 16
_MOST_CHUNKS = 256
"""Number of chunks of a body that may have any size: clients send a form's fields in several each."""
_SMALLEST_CHUNK = 256
"""Least average bytes of all further chunks, which cost the same however small."""
BACKLOG = 128
"""Backlog of connections, which are accepted in one go before idle ones are closed."""


def most_connections(most: int, *, slots: int) -> int:
    """Number of connections, at most `most`, that the limit of open files allows in addition to `slots` jobs. Raises
    UserError if there are too few."""
    limit = raise_descriptor_limit()
    per_kind = (limit - _OF_OURS - slots * _OF_A_SLOT) // 2  # one that fetches a video holds its file open, too
    if per_kind < _FEWEST:
        raise UserError(
            f"this process may have {limit} files open, and needs {limit + 2 * (_FEWEST - per_kind)}: raise `ulimit -n`"
        )
    return min(most, per_kind)


class Door:
    """The connections of one process; used only in the thread of its event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._all: set[Connection] = set()
        self._strangers: dict[Connection, None] = {}
        """Connections without a request so far, or one that has shown no key yet, the oldest first."""
        self._idle: dict[Connection, None] = {}
        """Connections that are idle after a response, the longest idle first."""
        self._unread: dict[Connection, float] = {}
        """Connections whose clients do not read a response -> since when, the longest first."""

    def enter(self, connection: "Connection") -> bool:
        """Whether it may stay; at the limit, one that does nothing is closed instead."""
        if len(self._all) >= self._most:
            other = self._dispensable()
            if other is None:
                return False
            self.leave(other)
            other.transport.abort()  # bytes that nobody reads would keep it, and its descriptor
        self._all.add(connection)
        self._strangers[connection] = None
        return True

    def begin(self, connection: "Connection") -> None:
        """Record that the connection has a request."""
        if connection in self._all:
            self._forget(connection)
            self._strangers[connection] = None

    def rest(self, connection: "Connection") -> None:
        """Record that the connection's request is finished."""
        if connection in self._all:
            self._forget(connection)
            self._idle[connection] = None

    def pause(self, connection: "Connection") -> None:
        """Record that as much waits to be sent as may."""
        self._unread[connection] = time.monotonic()

    def resume(self, connection: "Connection") -> None:
        """Record that the client has read it."""
        self._unread.pop(connection, None)

    def leave(self, connection: "Connection") -> None:
        self._all.discard(connection)
        self._forget(connection)
        self.resume(connection)

    def _forget(self, connection: "Connection") -> None:
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)

    def _dispensable(self) -> "Connection | None":
        while (stranger := next(iter(self._strangers), None)) and stranger.has_key:
            del self._strangers[stranger]
        unread = (each for each, since in self._unread.items() if time.monotonic() - since >= _SECONDS_TO_READ)
        return stranger or next(iter(self._idle), None) or next(unread, None)


class _Sparing(h11.Connection):
    """Refuses bodies in very many small chunks, which are expensive, and bodies with both a length and chunks, which
    allow request smuggling through a proxy. Packets, in which any body may come, are not chunks."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._num_chunks = self._num_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and {b"content-length", b"transfer-encoding"} <= dict(event.headers).keys():
            raise h11.RemoteProtocolError("the body has both a length and chunks")
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > _MOST_CHUNKS + self._num_bytes // _SMALLEST_CHUNK:
                raise h11.RemoteProtocolError("the body comes in too many chunks")
        return event

    def start_next_cycle(self) -> None:
        super().start_next_cycle()
        self._num_chunks = self._num_bytes = 0


class Connection(H11Protocol):
    """uvicorn's connection with a timeout for the head of a request, which single bytes do not extend."""

    def __init__(self, *arguments: Any, door: Door, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.conn = _Sparing(h11.SERVER, DEFAULT_MAX_INCOMPLETE_EVENT_SIZE)
        self._door = door
        self._end: asyncio.TimerHandle | None = None
        """Timer that closes it when it stays idle; None while a request is processed."""

    @property
    def has_key(self) -> bool:
        """Whether its request has shown a valid key."""
        return self.cycle is not None and "key_id" in self.cycle.scope["state"]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self._door.enter(self):
            self._end = self.loop.call_later(_SECONDS_TO_ASK, transport.close)
        else:
            transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._door.pause(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._door.resume(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
        self._door.leave(self)
        super().connection_lost(exc)

    def _follow(self) -> None:
        is_answered = self.cycle is None or self.cycle.response_complete
        if not is_answered and self._end is not None:
            self._end.cancel()
            self._end = None
            self._door.begin(self)
        elif is_answered and self._end is None and not self.transport.is_closing():
            self._end = self.loop.call_later(_SECONDS_TO_ASK, self.transport.close)
            self._door.rest(self)
