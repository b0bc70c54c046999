"""The part of its machine that this process may use, by its control groups: cores, with threads and how they wait, and
memory, with the refusal of plans that exceed it; and how many files it may open."""

import math
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

from megadit.models.shared.errors import UserError

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit and use of a control group's memory, and its caches in memory.stat: of version 2, of version 1."""
THREADS = "OMP_NUM_THREADS"
SHARED_OUT = "MEGADIT_THREADS"
"""Variable set together with `OMP_NUM_THREADS` if this package set it, not the user: the same number."""
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
"""OpenMP settings (GNU's, then LLVM's and Intel's): threads sleep until there is work, because spinning would take
cores from other processes and threads. A short spin costs less than falling asleep."""
GIB = 2**30
TOO_MUCH = 1.3
"""Ratio of estimated to free memory from which a plan is refused; estimates are accurate to a tenth."""
ANYWAY = "--even_if_too_large"
"""The option that starts a refused plan anyway."""
ANYWAY_HELP = "start even if the estimated memory exceeds what is free"


def available_cores() -> int:
    """Number of cores that this process may use, by affinity and by its control group's quota; at least 1."""
    return max(1, math.floor(min([_allowed_cores(), *_quotas()])))


def asked_threads() -> int | None:
    """The number of threads in the user's OMP_NUM_THREADS; None if not set."""
    said = os.environ.get(THREADS, "").partition(",")[0].strip()
    return int(said) if said.isdecimal() and int(said) and said != os.environ.get(SHARED_OUT) else None


def threads_of_a_rank(ranks: int = 1) -> int:
    """Number of threads of a rank: the user's choice, or the available cores divided among this machine's ranks."""
    return asked_threads() or max(1, available_cores() // ranks)


def prepare_threads() -> None:
    """Configures libraries that are imported later: how threads wait, and a CPU quota that they ignore."""
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)
    if available_cores() < _allowed_cores():
        os.environ.update(rank_environment(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def rank_environment(ranks: int) -> dict[str, str]:
    """Environment variables that set the threads of each of `ranks` ranks; {} if the user has set them."""
    return {} if asked_threads() else dict.fromkeys((THREADS, SHARED_OUT), str(threads_of_a_rank(ranks)))


def raise_descriptor_limit() -> int:
    """Raises the limit of open files of this process and its children to the maximum; returns it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _allowed_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas() -> Iterator[float]:
    """The quota in cores of each control group around this process that has one."""
    for folder, read in product(_own_groups("cpu"), (_max, _quota_and_period)):
        with suppress(OSError, ValueError):  # no such group, of the other version, or "max"
            quota, period = map(int, read(folder))
            if quota > 0 and period > 0:
                yield quota / period


def _own_groups(controller: str) -> list[Path]:
    """The control groups that limit this process, as folders: those of version 2, and of version 1 of `controller`."""
    lines = ["0::/", f"1:{controller}:/"]  # where nothing tells: those of a container
    with suppress(OSError):
        lines = OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    found = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            found += _around(CONTROL_GROUPS / controllers, place)
    return found


def _around(root: Path, place: str) -> list[Path]:
    """The folders of a control group and of those around it; a container sees its own group as the root."""
    own = root / place.lstrip("/")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]


def _max(folder: Path) -> list[str]:
    return (folder / "cpu.max").read_text(encoding="utf-8").split()


def _quota_and_period(folder: Path) -> tuple[str, str]:
    quota, period = (folder / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
    return quota.read_text(encoding="utf-8"), period.read_text(encoding="utf-8")


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
    return min(_available_memory(), *(_left_of_group(folder) for folder in _own_groups("memory")), sys.maxsize)


def _available_memory() -> int:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left_of_group(folder: Path) -> int:
    """Bytes up to its limit, including reclaimable caches; infinite without a limit."""
    for limit, used, cached in _MEMORY_FILES:
        with suppress(OSError, ValueError):  # no such group, of the other version, or "max"
            left = int((folder / limit).read_text(encoding="ascii")) - int((folder / used).read_text(encoding="ascii"))
            lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            return max(0, left + int(dict(line.split() for line in lines).get(cached, 0)))
    return sys.maxsize
