"""What processes hold in memory while something is tried."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST = 3 << 29
"""Bytes: of the 2 GiB that no attack may exceed, what a process leaves that has loaded its libraries."""


@contextmanager
def within_memory(*pids: int, limit: int = MOST) -> Iterator[None]:
    """None of these processes, or this one, takes so many bytes more in the meantime."""
    pids = pids or (os.getpid(),)
    before = {pid: _resident(pid, "VmRSS") for pid in pids}
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the most that it has held is forgotten
    yield
    most = {pid: _resident(pid, "VmHWM") for pid in pids}
    print(f"at most {max(most.values()) / 2**20:.0f} MiB in a process")
    assert all(most[pid] - before[pid] < limit for pid in pids), (before, most)


def _resident(pid: int, name: str) -> int:
    return int(re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1]) << 10
