"""Memory of this machine: measuring, formatting, and refusal of plans that exceed it."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from megadit.models.shared.errors import UserError

GIB = 2**30
TOO_MUCH = 1.3
"""Ratio of estimated to free memory from which a plan is refused; estimates are accurate to a tenth."""
ANYWAY = "--even_if_too_large"
"""The option that starts a refused plan anyway."""
ANYWAY_HELP = "start even if the estimated memory exceeds what is free"


def memory_in_words(num_bytes: float) -> str:
    """Format a size to two significant digits: "190 GiB", "2.5 GiB", "0.11 GiB", "64 MiB"."""
    unit, name = (GIB, "GiB") if num_bytes >= GIB / 10 else (GIB / 1024, "MiB")
    value = float(f"{num_bytes / unit:.2g}")
    return f"{value:,.0f} {name}" if value >= 10 else f"{value:g} {name}"


def check_memory_fits(needed: float, free: float, what: str, remedy: str) -> None:
    """Raises UserError if `what` needs far more bytes than are free."""
    if needed >= TOO_MUCH * free:
        raise UserError(
            f"{what} needs about {memory_in_words(needed)} of memory, and {memory_in_words(free)} are free: {remedy}; "
            f"{ANYWAY} starts it anyway"
        )


def host_memory() -> int:
    """Bytes that processes can still allocate: of the machine's memory or of their control group's, whichever is
    less."""
    return min(_available_memory(), *(_left_of_group(folder) for folder in _memory_groups()), sys.maxsize)


def _available_memory() -> int:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_groups() -> list[Path]:
    """The control groups (version 2) that limit this process, as folders."""
    root = Path("/sys/fs/cgroup")
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        place = next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
        own = root / place
        return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return [root]


def _left_of_group(folder: Path) -> int:
    """Bytes up to its limit, including reclaimable caches; infinite without a limit."""
    try:
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):  # no such group, or "max"
        return sys.maxsize
    return max(0, limit - used + int(stat.get("inactive_file", 0)))
