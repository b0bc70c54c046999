"""A rank that stops, dies or hangs is named, with its place, in time."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from megadit.train.monitoring import watchdog
from megadit.train.monitoring.watchdog import EXIT_CODE, Watchdog

LIMIT = 8.0
"""Seconds; a machine with much to do keeps a thread waiting for some."""
TIMEOUT = 240
RANK = """
import os, pathlib, signal, sys, time
from megadit.train.monitoring.watchdog import Watchdog
folder, rank, behaviour = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def a_collective_that_waits():
    time.sleep(600)

(folder / f"{rank} is ready").touch()
while behaviour != "go on" and len(list(folder.glob("* is ready"))) < 2:
    time.sleep(0.01)
with Watchdog(folder, rank=rank, world_size=2, limit=float(sys.argv[4])) as watchdog:
    for step in range(1, 1_000_000):
        watchdog.mark(step, "reading data")
        if behaviour == "hang" and step == 20:
            time.sleep(600)
        if behaviour == "stop" and '"step": 0' not in (folder / f"rank{rank:05d}.json").read_text():
            os.kill(os.getpid(), signal.SIGSTOP)
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
            [sys.executable, "-c", RANK, str(tmp_path), str(rank), behaviour, str(LIMIT)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def step(folder, rank):
    try:
        return json.loads((folder / f"rank{rank:05d}.json").read_text())["step"]
    except (OSError, ValueError):
        return 0


def test_a_stopped_rank_is_named(start):
    first, second = start(0, "wait"), start(1, "stop")
    output = first.communicate(timeout=TIMEOUT)[0]
    assert first.returncode == EXIT_CODE
    assert re.search(
        rf"error: rank 1 \(process {second.pid} on .*\) has given no sign of life for \d+ s, while", output
    )
    assert re.search(r"in step \d+; rank 0 ends", output)
    assert "in a_collective_that_waits" in output, "the stack of the rank that waits"


def test_a_hanging_rank_is_named_by_those_who_wait(start):
    ranks = start(0, "wait"), start(1, "hang")
    outputs = [process.communicate(timeout=TIMEOUT)[0] for process in ranks]
    assert all("rank 1 (process" in output for output in outputs if output), outputs
    assert any("has made no progress for" in output and "while reading data in step 20" in output for output in outputs)


def test_ranks_that_go_on_are_left_alone(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    ranks = [Watchdog(tmp_path, rank=rank, world_size=2, limit=LIMIT) for rank in range(2)]

    def second(*alive):
        clock[0] += 1
        for rank in alive:
            rank.mark(int(clock[0]), "reading data")
            rank._write()

    for _ in range(100):
        second(*ranks)
        assert [rank._stuck() for rank in ranks] == [None, None]
    stuck_after = 0
    while (found := ranks[0]._stuck()) is None:
        second(ranks[0])
        stuck_after += 1
    assert found[0] == 1 and stuck_after == LIMIT + 1


def test_a_dead_process_is_found(start, tmp_path):
    second = start(1, "go on")
    with Watchdog(tmp_path, rank=0, world_size=2, limit=1000) as dog:
        wait_until_watched_rank(tmp_path, 1)
        assert dog.lost_rank() is None
        second.kill()
        second.wait()
        dog.mark(6, "adding up the losses of all ranks")
        said = r"died; last heard of \d+ s before, .* in step \d+, and rank 0 is adding up .* in step 6"
        assert re.match(rf"rank 1 \(process {second.pid} on .*\) {said}", dog.lost_rank())
    assert not (tmp_path / "rank00000.json").exists(), "a rank that ends leaves no trace"


def test_a_process_that_is_just_ending_is_found(start, tmp_path, monkeypatch):
    """Its connections are closed before it is gone."""
    second = start(1, "go on")
    with Watchdog(tmp_path, rank=0, world_size=2, limit=1000) as dog:
        wait_until_watched_rank(tmp_path, 1)
        looks, dead_rank = [], dog._dead_rank

        def look():
            looks.append(found := dead_rank())
            if len(looks) == 1:
                second.kill()
                second.wait()
            return found

        monkeypatch.setattr(dog, "_dead_rank", look)
        monkeypatch.setattr(watchdog, "SECONDS_TO_END", 60.0)
        assert f"rank 1 (process {second.pid}" in dog.lost_rank() and looks[0] is None


def wait_until_watched_rank(folder, rank):
    deadline = time.monotonic() + TIMEOUT
    while not step(folder, rank):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_limit_watches_nothing(tmp_path):
    with Watchdog(tmp_path / "nowhere", rank=0, world_size=1, limit=0) as dog:
        dog.mark(1, "reading data")
        assert dog.lost_rank() is None
    assert not (tmp_path / "nowhere").exists()


# ------------------------------------------------------------------------------------------------ whole runs

LIMIT_OF_TRAINING = 12.0
ARGUMENTS = (
    *("-m", "megadit.train", "--recipe", "digits_tiny", "--mock", "train.train_iters=5000", "validation.interval=0"),
    *("checkpoint.save_interval=5000", "logger.tensorboard=false", f"health.watchdog_seconds={LIMIT_OF_TRAINING:g}"),
)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_of_a_training_is_missed(start_ranks, tmp_path, number):
    ranks = start_ranks(2, *ARGUMENTS, f"train.output_dir={tmp_path}")
    while not step(tmp_path / "watchdog", 1):
        assert all(rank.poll() is None for rank in ranks), ranks[0].communicate()[0]
        time.sleep(0.05)
    os.kill(ranks[1].pid, number)
    output = ranks[0].communicate(timeout=TIMEOUT)[0]
    assert ranks[0].returncode == EXIT_CODE
    assert f"error: rank 1 (process {ranks[1].pid}" in output and "in step" in output
    if number == signal.SIGSTOP:
        assert "has given no sign of life" in output and "train/engine/step.py" in output
    else:
        assert "died; last heard of" in output and "Traceback" not in output
