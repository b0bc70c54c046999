"""A proxy that breaks what passes through it, as networks, balancers and dying gateways do."""

import contextlib
import itertools
import random
import re
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

FAULTS = ("refuse", "kill", "hang", "half", "bad gateway")
"""Before it is passed on, after, never answered, cut in its middle, a balancer's own answer; "garbled", of a
video alone, is other bytes of the same length."""


@dataclass
class Fault:
    """What happens to the next `times` requests whose first line matches."""

    asked: str
    kind: str
    times: int


@dataclass
class FaultyProxy:
    upstreams: list[tuple[str, int]]
    """Any that takes a connection gets a request."""
    faults: list[Fault] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Method and path of all requests that were passed on."""

    def __post_init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._is_over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._is_over.set()
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._pass_on, args=[connection], daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            request = _read_request(client)
            asked = request.partition(b" HTTP/")[0].decode()
            fault = next((each for each in self.faults if each.times and re.fullmatch(each.asked, asked)), None)
            kind = fault.kind if fault else None
            if fault:
                fault.times -= 1
            if kind == "bad gateway":
                client.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 4\r\nConnection: close\r\n\r\noops")
                return
            if kind == "refuse":
                _reset(client)
                return
            self.asked.append(asked)
            with self._connect() as gateway:
                gateway.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                self._answer(client, _pieces(gateway), kind)

    def _connect(self) -> socket.socket:
        *others, last = random.sample(self.upstreams, len(self.upstreams))
        for upstream in others:
            with contextlib.suppress(OSError):
                return socket.create_connection(upstream)
        return socket.create_connection(last)

    def _answer(self, client: socket.socket, chunks: Iterator[bytes], kind: str | None) -> None:
        if kind in ("kill", "hang"):
            next(chunks, b"")
            if kind == "hang":
                self._is_over.wait(60)
            _reset(client)
        elif kind == "half":
            head, _, body = next(chunks).partition(b"\r\n\r\n")
            body = body or next(chunks, b"")
            client.sendall(head + b"\r\n\r\n" + body[: len(body) // 2])
            client.shutdown(socket.SHUT_RDWR)
        elif kind == "garbled":
            head, _, body = next(chunks).partition(b"\r\n\r\n")
            client.sendall(head + b"\r\n\r\n")
            for part in itertools.chain([body], chunks):
                client.sendall(bytes(byte ^ 1 for byte in part))
        else:
            for chunk in chunks:
                client.sendall(chunk)


def _read_request(client: socket.socket) -> bytes:
    request = b""
    while b"\r\n\r\n" not in request:
        request += client.recv(1 << 16) or _end()
    head, _, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    while length and len(body) < int(length[1]):
        body += client.recv(1 << 16) or _end()
    return head + b"\r\n\r\n" + body


def _end() -> bytes:
    raise ConnectionResetError


def _pieces(gateway: socket.socket) -> Iterator[bytes]:
    while chunk := gateway.recv(1 << 16):
        yield chunk


def _reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
