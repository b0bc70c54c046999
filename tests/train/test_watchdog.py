"""A rank that stops, dies or hangs is named, with its place, in time."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from megadit.train.watchdog import EXIT_CODE, Watchdog

LIMIT = 3.0
RANK = """
import pathlib, sys, time
from megadit.train.watchdog import Watchdog
folder, rank, behaviour = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def a_collective_that_waits():
    time.sleep(60)

with Watchdog(folder, rank=rank, world_size=2, limit=3.0) as watchdog:
    for step in range(1, 10_000):
        watchdog.mark(step, "reading data")
        if behaviour == "hang" and step == 20:
            time.sleep(60)
        time.sleep(0.02)
        watchdog.mark(step, "adding up the losses of all ranks")
        if behaviour == "wait" and step == 20:
            a_collective_that_waits()
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def start(rank, behaviour):
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(rank), behaviour],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_until_watched(folder, ranks=2):
    deadline = time.monotonic() + 30
    while len(list(folder.glob("rank*.json"))) < ranks or any(not step(folder, rank) for rank in range(ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def step(folder, rank):
    try:
        return json.loads((folder / f"rank{rank:05d}.json").read_text())["step"]
    except (OSError, ValueError):
        return 0


def test_a_stopped_rank_is_named_within_the_limit(start, tmp_path):
    first, second = start(0, "wait"), start(1, "go on")
    wait_until_watched(tmp_path)
    second.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    output = first.communicate(timeout=30)[0]
    assert time.monotonic() - stopped < LIMIT + 5
    assert first.returncode == EXIT_CODE
    assert re.search(
        rf"error: rank 1 \(process {second.pid} on .*\) has given no sign of life for \d+ s, while", output
    )
    assert re.search(r"in step \d+; rank 0 ends", output)
    assert "in a_collective_that_waits" in output, "the stack of the rank that waits"


def test_a_hanging_rank_is_named_by_those_who_wait(start, tmp_path):
    outputs = [process.communicate(timeout=30)[0] for process in (start(0, "wait"), start(1, "hang"))]
    assert all("rank 1 (process" in output for output in outputs if output), outputs
    assert any("has not gone on for" in output and "while reading data in step 20" in output for output in outputs)


def test_ranks_that_go_on_are_left_alone(start, tmp_path):
    ranks = [start(rank, "go on") for rank in range(2)]
    wait_until_watched(tmp_path)
    time.sleep(LIMIT + 1.5)
    assert all(rank.poll() is None for rank in ranks)


def test_a_dead_process_is_found(start, tmp_path):
    second = start(1, "go on")
    with Watchdog(tmp_path, rank=0, world_size=2, limit=1000) as watchdog:
        wait_until_watched_rank(tmp_path, 1)
        assert watchdog.lost_rank() is None
        second.kill()
        second.wait()
        assert re.match(rf"rank 1 \(process {second.pid} on .*\) died while .* in step", watchdog.lost_rank())
    assert not (tmp_path / "rank00000.json").exists(), "a rank that ends leaves no trace"


def wait_until_watched_rank(folder, rank):
    deadline = time.monotonic() + 30
    while not step(folder, rank):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_limit_watches_nothing(tmp_path):
    with Watchdog(tmp_path / "nowhere", rank=0, world_size=1, limit=0) as watchdog:
        watchdog.mark(1, "reading data")
        assert watchdog.lost_rank() is None
    assert not (tmp_path / "nowhere").exists()


# ------------------------------------------------------------------------------------------------ whole runs

ARGUMENTS = (
    *("-m", "megadit.train", "--recipe", "digits_tiny", "--mock", "train.train_iters=5000", "validation.interval=0"),
    *("checkpoint.save_interval=5000", "logger.tensorboard=false", "health.watchdog_seconds=4"),
)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_of_a_training_is_missed(start_ranks, tmp_path, number):
    ranks = start_ranks(2, *ARGUMENTS, f"train.output_dir={tmp_path}")
    while not step(tmp_path / "watchdog", 1):
        assert all(rank.poll() is None for rank in ranks), ranks[0].communicate()[0]
        time.sleep(0.05)
    os.kill(ranks[1].pid, number)
    start = time.monotonic()
    output = ranks[0].communicate(timeout=60)[0]
    assert time.monotonic() - start < 4 + 5
    assert ranks[0].returncode == EXIT_CODE
    assert f"error: rank 1 (process {ranks[1].pid}" in output and "in step" in output
    if number == signal.SIGSTOP:
        assert "has given no sign of life" in output and "train/step.py" in output
    else:
        assert "died while" in output and "Traceback" not in output
