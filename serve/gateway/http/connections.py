"""Limits of a gateway's connections in number and time: who asks for nothing makes room for who does.

Every connection is a descriptor of the process. gRPC, over which Triton is asked, ends a process that has none left.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import DEFAULT_MAX_INCOMPLETE_EVENT_SIZE, H11Protocol

from megadit.models.shared.errors import UserError
from megadit.serve.supervise import raise_descriptor_limit

_SECONDS_TO_ASK = 10.0
"""Time from the beginning of a connection, or the end of an answer, until the head of the next request is complete."""
_OF_OURS = 512
"""Descriptors of the store, the log, the metrics and what waits to be accepted."""
_OF_A_SLOT = 8
"""Descriptors of a job at Triton."""
_FEWEST = 16
_MOST_CHUNKS = 16
"""Pieces of a body that may be as small as they like."""
_SMALLEST_CHUNK = 256
"""Average bytes of all further pieces: each costs as much to read as a small request."""
BACKLOG = 128
"""Connections that the kernel holds, and that are accepted in one go, before any has to make room."""


def most_connections(most: int, *, slots: int) -> int:
    """How many connections fit beside what `slots` jobs need; the process is let have as many files as it may.

    Raises:
        UserError: if hardly any do.
    """
    limit = raise_descriptor_limit()
    per_kind = (limit - _OF_OURS - slots * _OF_A_SLOT) // 2  # one that fetches a video holds its file open, too
    if per_kind < _FEWEST:
        raise UserError(
            f"this process may have {limit} files open, and needs {limit + 2 * (_FEWEST - per_kind)}: raise `ulimit -n`"
        )
    return min(most, per_kind)


class Door:
    """The connections of one process; all of it happens in the thread of its event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._all: set[Connection] = set()
        self._strangers: dict[Connection, None] = {}
        """Connections that have never asked for anything, the oldest first."""
        self._idle: dict[Connection, None] = {}
        """Connections whose requests are answered, the longest silent first."""

    def enter(self, connection: "Connection") -> bool:
        """Whether it may stay; where all places are taken, one that asks for nothing goes instead."""
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
        """Note that the connection asks for something."""
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)

    def rest(self, connection: "Connection") -> None:
        """Note that the connection's request is answered."""
        if connection in self._all:
            self._idle[connection] = None

    def leave(self, connection: "Connection") -> None:
        self._all.discard(connection)
        self.begin(connection)


class _Sparing(h11.Connection):
    """Reads no body that comes in very many pieces: chunks of a byte cost a thousand times their share. Nor one of two
    lengths, of which a proxy before it may take the other, and hand it a stranger's request in the rest."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._num_chunks = self._num_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and {b"content-length", b"transfer-encoding"} <= dict(event.headers).keys():
            raise h11.RemoteProtocolError("the body has both a length and chunks")
        if isinstance(event, h11.Data):
            self._num_chunks += 1
            self._num_bytes += len(event.data)
            if self._num_chunks > _MOST_CHUNKS + self._num_bytes // _SMALLEST_CHUNK:
                raise h11.RemoteProtocolError("the body comes in too many pieces")
        return event

    def start_next_cycle(self) -> None:
        super().start_next_cycle()
        self._num_chunks = self._num_bytes = 0


class Connection(H11Protocol):
    """uvicorn's connection, which has to ask within a time that single bytes do not prolong."""

    def __init__(self, *arguments: Any, door: Door, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.conn = _Sparing(h11.SERVER, DEFAULT_MAX_INCOMPLETE_EVENT_SIZE)
        self._door = door
        self._end: asyncio.TimerHandle | None = None
        """Timer that closes it when it stays silent; None while it is being answered."""

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
