"""How the ranks of a run find each other: over which network interface of several nodes, and at whose port."""

import fcntl
import os
import socket
import struct
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from megadit.models.shared.errors import UserError

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


def join_ranks(backend: str, **settings: Any) -> None:
    """Joins the other ranks.

    Raises:
        UserError: where they cannot meet: the port is another program's, or nobody answers.
    """
    try:
        dist.init_process_group(backend, **settings)
    except dist.DistNetworkError as error:
        place = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"{place}: the port is in use on this machine, perhaps by another run; set another MASTER_PORT for all "
                "ranks, or start them with --nproc or torchrun, which find one"
            ) from error
        raise UserError(f"the ranks cannot meet at {place}: {str(error).splitlines()[0]}") from error
