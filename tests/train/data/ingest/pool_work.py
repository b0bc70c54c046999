"""What the processes of test_pool.py do: they import no more than it takes."""

import os
import re
import signal
import time
from pathlib import Path

import numpy as np

from megadit.train.data.ingest.pool import have_read, still_alive


def work(item: int) -> str:
    if item == 3:
        os._exit(1)  # as a decoder that crashes
    if item == 5:
        re.match(
            "(a+)+$", "a" * 64 + "b"
        )  # as a decoder that does not return: C code, which no Python handler interrupts
    return f"did {item}"


def slow_but_alive(folder: Path) -> str:
    """Goes on once the caller has noted how far it is."""
    for number in range(1, 5):
        deadline = time.process_time() + 0.2
        while time.process_time() < deadline:
            pass
        still_alive()
        have_read(10.0)
        while not (folder / f"{10 * number}").exists():
            time.sleep(0.01)
    return "did it"


def asleep(item: int) -> str:
    if item == 1:  # as storage that does not answer; of the time it has, the rest is left out
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(3600)
    return f"did {item}"


class Killed:
    """Pickled, it ends its process as the kernel does when memory is short."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


def frames_of(item: int) -> tuple[int, np.ndarray, Killed | None]:
    frames = np.full((8, 64, 64, 3), item, np.uint8)
    return item, frames, Killed() if item in (1, 4) else None


def no_frames(item: int) -> tuple[int, None, None]:
    return item, None, None


def lost(item: int) -> str:
    return f"lost {item}"
