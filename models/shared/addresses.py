"""Public and private IP addresses, and URLs without their passwords."""

import ipaddress
import re

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
