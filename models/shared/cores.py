"""The machine's cores: how many this process may use, numbers of threads, and how threads wait."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
THREADS = "OMP_NUM_THREADS"
SHARED_OUT = "MEGADIT_THREADS"
"""Variable set together with `OMP_NUM_THREADS` if this package set it, not the user: the same number."""
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
"""OpenMP settings (GNU's, then LLVM's and Intel's): threads sleep until there is work, because spinning would take
cores from other processes and threads. A short spin costs less than falling asleep."""


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


def _allowed_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas() -> Iterator[float]:
    """The quota in cores of each control group around this process that has one."""
    with suppress(OSError):
        for line in OWN_GROUPS.read_text(encoding="utf-8").splitlines():
            _, controllers, place = line.split(":", 2)
            if not controllers:
                yield from _limits(CONTROL_GROUPS, place, _max)
            elif "cpu" in controllers.split(","):
                yield from _limits(CONTROL_GROUPS / controllers, place, _quota_and_period)


def _limits(root: Path, place: str, read: Callable[[Path], Sequence[str]]) -> Iterator[float]:
    own = root / place.lstrip("/")  # a container sees its own group as the root
    for folder in (own, *own.parents):
        if folder.is_relative_to(root):
            with suppress(OSError, ValueError):  # no such group, or "max"
                quota, period = map(int, read(folder))
                if quota > 0 and period > 0:
                    yield quota / period


def _max(folder: Path) -> list[str]:
    return (folder / "cpu.max").read_text(encoding="utf-8").split()


def _quota_and_period(folder: Path) -> tuple[str, str]:
    quota, period = (folder / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
    return quota.read_text(encoding="utf-8"), period.read_text(encoding="utf-8")
