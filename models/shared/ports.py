"""Ports of this machine that nobody listens on."""

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """So many different ports of 127.0.0.1, free at this moment: whoever comes first may take them."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
