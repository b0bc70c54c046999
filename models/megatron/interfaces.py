"""The network interface by which the ranks of several nodes find each other."""

import fcntl
import os
import socket
import struct
from contextlib import suppress

SIOCGIFADDR = 0x8915
"""Asks for the address of an interface (netdevice(7))."""


def name_gloos_interface() -> None:
    """On several nodes, `GLOO_SOCKET_IFNAME`, where it is not set: the interface that reaches the first node.

    gloo takes the one that this node's name resolves to, which on many images is loopback; the forms of
    `NCCL_SOCKET_IFNAME` that leave interfaces out, such as `^docker,lo`, it does not know.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not several or "GLOO_SOCKET_IFNAME" in os.environ or "MASTER_ADDR" not in os.environ:
        return
    if (name := interface_towards(os.environ["MASTER_ADDR"])) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_towards(host: str) -> str | None:
    """The name of the network interface from which packets to `host` leave; None for loopback, or where there is none.
    Nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((host, 9))
        own = socket.inet_aton(asked.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, request)[20:24]
                if found == own and not own.startswith(b"\x7f"):
                    return name
    return None
