"""Limits of a gateway's connections in number and time: idle connections are closed for active ones.

Every connection is a file descriptor. gRPC, which is used for Triton, aborts a process without free descriptors.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import DEFAULT_MAX_INCOMPLETE_EVENT_SIZE, H11Protocol

from megadit.models.shared.errors import UserError
from megadit.models.shared.resources import raise_descriptor_limit

_SECONDS_TO_ASK = 10.0
"""Seconds from the start of a connection, or the end of a response, to the complete head of the next request."""
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
        """Connections without a request so far, the oldest first."""
        self._idle: dict[Connection, None] = {}
        """Connections that are idle after a response, the longest idle first."""

    def enter(self, connection: "Connection") -> bool:
        """Whether it may stay; at the limit, an idle connection is closed instead."""
        if len(self._all) >= self._most:
            waiting = next(iter(self._strangers or self._idle), None)
            if waiting is None:
                return False
            self.leave(waiting)
            waiting.transport.close()
        self._all.add(connection)
        self._strangers[connection] = None
        return True

    def begin(self, connection: "Connection") -> None:
        """Record that the connection has a request."""
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)

    def rest(self, connection: "Connection") -> None:
        """Record that the connection's request is finished."""
        if connection in self._all:
            self._idle[connection] = None

    def leave(self, connection: "Connection") -> None:
        self._all.discard(connection)
        self.begin(connection)


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
