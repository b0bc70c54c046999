"""Work in several processes: in order, and past items that take their process with them or keep it for good."""

import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megadit.train.data.ingest import pool
from megadit.train.data.ingest.memory import LEAST_BYTES, Memory
from megadit.train.data.ingest.pool import Patience, Pool, still_alive

from .pool_work import asleep, frames_of, lost, no_frames, slow_but_alive, work

PATIENCE = Patience(processor_seconds=0.5, seconds=600)


def open_memory() -> list[str]:
    """Memory of results that this process maps or holds open."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    held = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if os.path.islink(file)]
    return [line for line in mapped + held if "memfd:result" in line]


def test_results_come_in_order_and_crashes_and_hangs_cost_one_item_each():
    with Pool(2, PATIENCE) as two:
        results = list(two.map(work, range(10), lost))
    assert results == [f"lost {item}" if item in (3, 5) else f"did {item}" for item in range(10)]


def test_who_gives_signs_of_life_may_take_long_and_says_how_far_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(pool, "SECONDS_BETWEEN_SIGNS", 0.05)
    seen = []

    def note(seconds: float) -> None:
        seen.append(seconds)
        (tmp_path / f"{seconds:g}").touch()

    with Pool(1, PATIENCE, note) as one:
        assert list(one.map(slow_but_alive, [tmp_path], lost)) == ["did it"]
    assert seen == sorted(seen) and {*seen} - {0.0} == {10.0 * number for number in range(1, 5)}


def test_who_waits_too_long_on_the_clock_is_lost():
    with Pool(1, Patience(seconds=600)) as one:
        assert list(one.map(asleep, range(3), lost)) == ["did 0", "lost 1", "did 2"]


def test_without_processes_the_caller_does_the_work():
    still_alive()  # nobody would notice the end of this process
    with Pool(0) as none:
        assert list(none.map(str, range(3), lost)) == ["0", "1", "2"]


def test_arrays_are_not_pickled():
    small, large = np.arange(7), [np.full(LEAST_BYTES + 1, 3, np.uint8), np.arange(LEAST_BYTES, dtype=np.float32)]
    memory = Memory()
    written = memory.write({"small": small, "large": large})
    assert len(written.pickled) < 1000 and len(written.places) == 2
    found = memory.read(written)
    del memory
    for array, expected in zip([found["small"], *found["large"]], [small, *large], strict=True):
        np.testing.assert_array_equal(array, expected)
        assert array.flags.aligned and array.flags.writeable and array.dtype == expected.dtype
    assert open_memory()
    del found, array
    assert not open_memory()


def test_killed_processes_leave_no_memory_behind():
    named = set(Path("/dev/shm").glob("psm_*"))
    with Pool(2, PATIENCE) as two:
        results = list(two.map(frames_of, range(6), no_frames))
        assert [item for item, _, _ in results] == list(range(6))
        assert [frames is None for _, frames, _ in results] == [item in (1, 4) for item in range(6)]
        assert all((frames == item).all() for item, frames, _ in results if frames is not None)
        places = sorted(frames.ctypes.data for _, frames, _ in results if frames is not None)
        assert all(b - a >= results[0][1].nbytes for a, b in pairwise(places)) and open_memory()
        unread = two.map(frames_of, [7, 8], no_frames)
        next(unread)
    del results, unread
    assert not open_memory() and set(Path("/dev/shm").glob("psm_*")) <= named


def test_a_map_within_another_may_lose_its_processes():
    """As source media of a shard, while its clips are decoded already."""
    with Pool(1, PATIENCE) as one:
        outer = one.map(frames_of, [0, 2, 3], no_frames)
        assert next(outer)[0] == 0
        assert [frames is None for _, frames, _ in one.map(frames_of, [1, 2], no_frames)] == [True, False]
        assert [frames.max() for _, frames, _ in outer] == [2, 3]


@pytest.mark.parametrize(
    ("kill", "number"), [("os.kill, os.getpid()", signal.SIGTERM), ("os.killpg, 0", signal.SIGHUP)], ids=["one", "all"]
)
def test_a_signal_to_end_leaves_no_process_and_no_semaphore(tmp_path, kill, number):
    """A closed terminal tells all its processes, among them the one that removes semaphores."""
    program = tmp_path / "ended.py"
    program.write_text(
        "import os, signal\n"
        "from functools import partial\n"
        "from megadit.train.data.ingest.pool import Pool\n"
        "if __name__ == '__main__':\n"
        "    with Pool(2) as pool:\n"
        f"        list(pool.map(partial({kill}), [{int(number)}], print))\n"
    )
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")


@pytest.mark.parametrize("moment", ["starting", "working"])
def test_a_terminals_interrupt_ends_the_workers_without_a_word(tmp_path, moment):
    """Ctrl-C goes to all processes of the terminal at once; who asked says what happened."""
    program = tmp_path / "interrupted.py"
    program.write_text(
        "import os, signal, sys, time\n"
        "from functools import partial\n"
        "from pathlib import Path\n"
        "from megadit.train.data.ingest.pool import Pool\n"
        "if __name__ == '__main__':\n"
        "    try:\n"
        "        if sys.argv[1] == 'starting':\n"
        "            signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGINT))\n"
        "            signal.setitimer(signal.ITIMER_REAL, 0.05)\n"
        "        with Pool(2) as pool:\n"
        "            kill = partial(os.killpg, 0) if sys.argv[1] == 'working' else time.sleep\n"
        "            items = [int(signal.SIGINT)] * 2 if sys.argv[1] == 'working' else [30, 30]\n"
        "            list(pool.map(kill, items, print))\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted')\n"
    )
    command = [sys.executable, str(program), moment]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=120)
    assert done.stdout == "interrupted\n" and "Traceback" not in done.stderr, done.stderr
