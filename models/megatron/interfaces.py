"""How the ranks of a run find each other: the network interface between nodes, and the port of the first node."""

import fcntl
import os
import signal
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from operator import methodcaller
from typing import Any

import torch.distributed as dist

from megadit.models.shared.cli.command import ending_signals_to
from megadit.models.shared.errors import Rule, UserError, enforce
from megadit.models.shared.resources import raise_descriptor_limit

SIOCGIFADDR = 0x8915
"""ioctl request for the address of an interface (netdevice(7))."""
_REMEDY = "start the ranks with --nproc or torchrun, which set it, or unset RANK, WORLD_SIZE and their like"
_OF_A_RANK: tuple[Rule[Mapping[str, str]], ...] = (
    *(
        Rule(needs=methodcaller("get", name), remedy=f"{name} of a rank is not set in the environment; {_REMEDY}")
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    ),
    Rule(
        needs=lambda those: int(those["RANK"]) < int(those["WORLD_SIZE"]),
        remedy=lambda those: (
            f"RANK={those['RANK']} is none of the ranks below WORLD_SIZE={those['WORLD_SIZE']}; {_REMEDY}"
        ),
    ),
    Rule(
        needs=lambda those: those["MASTER_PORT"].isdecimal() and int(those["MASTER_PORT"]) < 1 << 16,
        remedy=lambda those: f"MASTER_PORT={those['MASTER_PORT']!r} in the environment is no port; {_REMEDY}",
    ),
)
"""Rules of the variables by which a process knows its rank."""


def name_gloos_interface() -> None:
    """Sets `GLOO_SOCKET_IFNAME` on several nodes, if it is not set, to the interface that reaches the first node.

    By default gloo uses the interface that this node's name resolves to, on many images loopback; it does not
    understand the exclusions of `NCCL_SOCKET_IFNAME`, such as `^docker,lo`.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not several or "GLOO_SOCKET_IFNAME" in os.environ or "MASTER_ADDR" not in os.environ:
        return
    if (name := interface_towards(os.environ["MASTER_ADDR"])) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_towards(host: str) -> str | None:
    """The name of the network interface from which packets to `host` leave; None for loopback, or if there is none.
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
    """Initializes torch.distributed with all ranks; of hundreds, gloo connects each with every other one in each group.
    Signals to end do so at once while it waits for them.

    Raises:
        UserError: if the environment describes no rank, the port is in use by another program, or ranks do not connect.
    """
    enforce(_OF_A_RANK, os.environ)
    name_gloos_interface()
    raise_descriptor_limit()
    try:
        with ending_signals_to(signal.SIG_DFL):  # nothing is begun; a handler would run after half an hour
            dist.init_process_group(backend, **settings)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        place = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"{place}: the port is in use on this machine, perhaps by another run; set another MASTER_PORT for all "
                "ranks, or start them with --nproc or torchrun, which find one"
            ) from error
        raise UserError(f"the ranks cannot meet at {place}: {str(error).splitlines()[0]}") from error
