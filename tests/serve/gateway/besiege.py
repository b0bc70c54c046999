"""Connections that ask for nothing, opened again as often as they are closed: besiege.py PORT IDLE HALF.

IDLE of them say nothing, HALF begin a request that they never end. A line is printed once half of all are open at the
same time; the end of the standard input is the end of the siege. In a process of its own, so that honest clients do
not wait for it.
"""

import contextlib
import resource
import select
import socket
import sys

SAID = b"POST /v1/videos HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"


def connect(port: int, said: bytes) -> socket.socket | None:
    with contextlib.suppress(OSError):
        connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        connection.sendall(said)
        connection.setblocking(False)
        return connection
    return None


def is_open(connection: socket.socket | None) -> bool:
    if connection is None:
        return False
    try:
        return connection.recv(1 << 16) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def main(port: int, idle: int, half: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    says, has_told = [b""] * idle + [SAID] * half, False
    connections: list[socket.socket | None] = [None] * len(says)
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        for place, said in enumerate(says):
            if not is_open(connections[place]):
                if connections[place] is not None:
                    connections[place].close()
                connections[place] = connect(port, said)
        if not has_told and None not in connections[: len(says) // 2]:
            has_told = True
            print("besieged", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
