"""Files at http(s) addresses, which are strangers': all of an answer has one deadline and one limit."""

import http.client
import socket
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from functools import partial
from typing import Any

MAX_BYTES = 1 << 28
SECONDS = 300.0
"""For a whole answer; one that drips would otherwise never end."""


def download(url: str, *, seconds: float = SECONDS) -> bytes:
    """The file at an http(s) address, all of it within so many seconds.

    Raises:
        OSError: if it cannot be had in time.
        ValueError: for another kind of address, or a very large file.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not an http address")
    connections = _Connections()
    timer = threading.Timer(seconds, connections.cut)
    timer.start()
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "megadit"})
        with urllib.request.build_opener(connections).open(request, timeout=seconds) as answer:
            content = answer.read(MAX_BYTES + 1)
    except http.client.HTTPException as error:
        raise OSError(f"{url} does not answer in HTTP: {type(error).__name__} {error}") from None
    finally:
        timer.cancel()
        if connections.are_cut:
            raise TimeoutError(f"{url} was not sent whole within {seconds:g} seconds")
    if len(content) > MAX_BYTES:
        raise ValueError(f"{url} is larger than {MAX_BYTES >> 20} MiB")
    return content


class _Connections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler, urllib.request.FTPHandler):
    """Those of one exchange, redirections included, which another thread may cut."""

    def __init__(self) -> None:
        super().__init__()
        self.are_cut = False
        self._sockets: list[socket.socket] = []

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, http.client.HTTPConnection), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, http.client.HTTPSConnection), request)

    def ftp_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        raise urllib.error.URLError("it leads to another kind of address")

    def cut(self) -> None:
        self.are_cut = True
        for connected in self._sockets:
            with suppress(OSError):  # closed meanwhile
                connected.shutdown(socket.SHUT_RDWR)

    def _connection(self, kind: type[http.client.HTTPConnection], host: str, **settings: Any) -> Any:
        connection = kind(host, **settings)
        connect = connection.connect

        def connect_and_note() -> None:
            connect()
            self._sockets.append(connection.sock)

        connection.connect = connect_and_note  # type: ignore[method-assign]
        return connection
