"""Public and private IP addresses, URLs without their passwords, and the certificates of HTTPS."""

import errno
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from megadit.models.shared.errors import UserError

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NAT64_OWN = ipaddress.ip_network("64:ff9b:1::/48")
_COMPATIBLE = ipaddress.ip_network("::/96")
_LOCAL = ipaddress.ip_network("::/127")
"""The unspecified address and the loopback address, which contain no IPv4 address."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def reached(address: str) -> Address:
    """The address that a connection reaches: an IPv6 address may contain an IPv4 one.

    Raises:
        ValueError: if it is no address.
    """
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv4Address):
        return parsed
    if parsed in _NAT64 or (parsed in _COMPATIBLE and parsed not in _LOCAL):
        return ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
    return parsed.ipv4_mapped or parsed.sixtofour or parsed


def is_public(address: str) -> bool:
    """Whether an IP address is public, not one of this machine or its network."""
    found = reached(address)
    is_own = isinstance(found, ipaddress.IPv6Address) and (found.is_site_local or found in _NAT64_OWN)
    return found.is_global and not found.is_multicast and not is_own


def is_link_local(address: str) -> bool:
    """Whether an address is link-local, such as 169.254.169.254, which serves secrets to cloud machines."""
    return reached(address).is_link_local


def is_address(host: str) -> bool:
    """Whether a host is an IP address, not a name."""
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def guard(is_refused: Callable[[str], bool], error: Exception) -> Callable[[str, Mapping[str, Any]], Awaitable[None]]:
    """Trace hook for one request of httpx: raises `error` for a connection to a refused address, before a byte is sent,
    after redirects and name resolution. A connection to a proxy of the environment passes: it applies its own rules."""
    place: tuple[str, int] | None = None

    async def check(event: str, info: Mapping[str, Any]) -> None:
        nonlocal place
        if event == "connection.connect_tcp.started":
            place = info["host"], info["port"]
        elif event == "connection.connect_tcp.complete" and place not in _proxies():
            stream = info["return_value"]
            if is_refused(stream.get_extra_info("server_addr")[0]):
                await stream.aclose()
                raise error

    return check


def _proxies() -> set[tuple[str | None, int]]:
    """(host, port) of the proxies that the environment names. It may also say where there is none: no_proxy."""
    urls = (url for kind, url in getproxies().items() if kind in ("http", "https", "all"))
    parts = [urlsplit(url if "://" in url else f"http://{url}") for url in urls]
    return {(each.hostname, each.port or {"https": 443}.get(each.scheme, 80)) for each in parts}


def shown(url: str) -> str:
    """A URL for messages and logs: without user and password, even if malformed."""
    url = re.sub(r":/+.*@", "://***@", url, flags=re.DOTALL)
    return re.sub(r"(?i)(password|secret|token|signature|sig)=[^&]*", r"\1=***", url)


def check_no_secret(url: str, name: str) -> None:
    """Raises UserError for a URL that contains a password, which the process list, logs and records would show."""
    _, _, rest = url.partition("://")
    if ":" in rest.rpartition("@")[0] or "=***" in shown(rest.partition("?")[2]):
        raise UserError(
            f"{name}={shown(url)} holds a password, which the process list, logs and records would show: leave it to "
            "the environment, or to fsspec's configuration (~/.config/fsspec)"
        )


# --- Free ports of this machine ---------------------------------------------------------------------------------------


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
            raise port_error(host, port, flag, error, name) from error


def port_error(host: str, port: int, flag: str, error: OSError, name: str = "") -> UserError:
    """The error of a port that cannot be used; `flag` is the option for another one."""
    who = f", and `ss -ltnp sport = :{port}` says who has this one" if error.errno == errno.EADDRINUSE else ""
    what = f"{host}:{port}{name and f' ({name})'}"
    return UserError(f"{what} cannot be used: {error.strerror}; {flag} takes another{who}")


@cache
def tls_context() -> ssl.SSLContext:
    """The certificates that httpx trusts, for all clients of a process: reading them takes longer than a request."""
    import httpx

    return httpx.create_ssl_context()
