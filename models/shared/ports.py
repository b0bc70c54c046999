"""Free ports of this machine."""

import socket
from contextlib import ExitStack

from megadit.models.shared.errors import UserError


def free_ports(count: int) -> list[int]:
    """Find `count` different free ports of 127.0.0.1; another process may take them before their use."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def check_free(host: str, port: int, flag: str, name: str = "") -> None:
    """Raises UserError, naming the option for another port, if the port is in use or not allowed."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            what = f"{host}:{port}{name and f' ({name})'}"
            raise UserError(f"{what} cannot be used: {error.strerror}; {flag} takes another") from error
