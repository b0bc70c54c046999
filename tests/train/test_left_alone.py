"""A run that nobody watches: its terminal closes, its reader leaves, another wants its folder, its launcher dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megadit.models.shared import folder_lock
from megadit.models.shared.folder_lock import FILE
from megadit.train.monitoring.watchdog import EXIT_CODE

STEPS = 7
SETTINGS = (
    f"train.train_iters={STEPS}", "checkpoint.save_interval=50", "validation.interval=0", "logger.tensorboard=false",
    "logger.curves=false", "train.num_threads=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def command(tiny_arguments):
    """Trains few steps, but for the folder."""
    return (*tiny_arguments, *SETTINGS)


@pytest.fixture(scope="module")
def expected(command, run_ranks, tmp_path_factory, read_metrics):
    """What an undisturbed run tells."""
    out = tmp_path_factory.mktemp("undisturbed")
    run_ranks(1, *command, f"train.output_dir={out}")
    assert not (out / FILE).exists()
    return read_metrics(out)


def num_steps(out) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def wait_for_steps(out, rank, steps=1) -> None:
    while num_steps(out) < steps:
        assert rank.poll() is None, rank.communicate()[0]
        time.sleep(0.002)


def times(out) -> dict:
    """When each file was written."""
    return {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}


LONG = f"train.train_iters={10**6}"


def test_a_signal_saves_and_is_the_exit_code(command, start_until, run_ranks, tmp_path, read_metrics, same, expected):
    # a busy machine runs up to two steps more before the main thread is told
    for step, number in ((1, signal.SIGHUP), (4, signal.SIGINT)):
        (rank,) = start_until(step, 1, *command, f"train.output_dir={tmp_path}")
        rank.send_signal(number)
        rank.send_signal(signal.SIGCONT)
        told, _ = rank.communicate(timeout=240)
        assert rank.returncode == 128 + number and "stopped by a signal" in told
        done = num_steps(tmp_path)
        assert (tmp_path / "checkpoints" / f"iter_{done:07d}").is_dir() and not (tmp_path / FILE).exists()
    run_ranks(1, *command, f"train.output_dir={tmp_path}")
    assert same(read_metrics(tmp_path), expected)


def test_of_two_ranks_one_is_told_and_both_end_with_its_code(command, start_ranks, tmp_path):
    ranks = start_ranks(2, *command, LONG, f"train.output_dir={tmp_path}")
    wait_for_steps(tmp_path, ranks[0])
    ranks[1].send_signal(signal.SIGHUP)
    for rank in ranks:
        rank.communicate(timeout=240)
    assert [rank.returncode for rank in ranks] == [128 + signal.SIGTERM, 128 + signal.SIGHUP]
    assert any((tmp_path / "checkpoints").iterdir())


def test_a_second_run_is_refused_until_the_first_one_is_killed(
    command, start_until, run_ranks, tmp_path, read_metrics, same, expected
):
    (first,) = start_until(1, 1, *command, f"train.output_dir={tmp_path}")
    before = times(tmp_path)
    (told,) = run_ranks(1, *command, f"train.output_dir={tmp_path}", code=2)
    assert f"is in use: process {first.pid} " in told and f"rm {tmp_path / FILE}" in told and "Traceback" not in told
    told = run_ranks(2, *command, f"train.output_dir={tmp_path}", code=2)
    assert sum("in use" in each for each in told) == 1, "one of them says so"
    assert times(tmp_path) == before, "the first one notices nothing"
    first.kill()
    first.wait()
    (told,) = run_ranks(1, *command, f"train.output_dir={tmp_path}")
    assert f"taken over from process {first.pid}" in told and same(read_metrics(tmp_path), expected)


def test_a_run_that_lost_its_folder_writes_nothing_more(
    command, start_until, run_ranks, tmp_path, read_metrics, same, expected
):
    (first,) = start_until(1, 1, *command, f"train.output_dir={tmp_path}")
    (tmp_path / FILE).unlink()
    run_ranks(1, *command, f"train.output_dir={tmp_path}")
    before = times(tmp_path)
    first.send_signal(signal.SIGCONT)
    told, _ = first.communicate(timeout=240)
    assert first.returncode == folder_lock.LOST_CODE and "writes nothing more" in told
    changed = {path for path, _ in times(tmp_path).items() ^ before.items()}
    assert changed <= set((tmp_path / "watchdog").glob("*"))
    assert same(read_metrics(tmp_path), expected)


def test_a_reader_that_is_killed_is_told_and_the_run_goes_on_later(
    command, start_until, run_ranks, tmp_path, read_metrics, same, expected
):
    (rank,) = start_until(1, 1, *command, "data.num_workers=1", f"train.output_dir={tmp_path}")
    for task in Path(f"/proc/{rank.pid}/task").iterdir():
        for reader in (task / "children").read_text().split():
            os.kill(int(reader), signal.SIGKILL)
    rank.send_signal(signal.SIGCONT)
    told, _ = rank.communicate(timeout=240)
    assert rank.returncode == EXIT_CODE, told[-3000:]
    assert told.count("error: a process that reads data has ended") == 1
    assert "Traceback" not in told
    run_ranks(1, *command, f"train.output_dir={tmp_path}")
    assert same(read_metrics(tmp_path), expected)


def test_a_tracker_that_fails_changes_nothing(command, run_ranks, tmp_path, read_metrics, same, expected):
    (tmp_path / "tensorboard").write_text("a file")
    trackers = ("logger.tensorboard=true", "logger.curves=true")
    (told,) = run_ranks(1, *command, *trackers, f"train.output_dir={tmp_path}")
    assert told.count("warning: ") == 1 and same(read_metrics(tmp_path), expected)


PROGRAM = """
import os, signal, sys
from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.command import StopRequest
def run(argv):
    with StopRequest() as stop:
        print("begun", flush=True)
        if argv == ["told"]:
            os.kill(os.getpid(), signal.SIGHUP)
        for _ in range(3):
            print("x" * 100_000, flush=True)
            print("y" * 100_000, file=sys.stderr, flush=True)
        open(sys.argv[1], "w").write(str(stop.has_come))
sys.exit(run_command(run, sys.argv[2:], is_run=True))
"""


def start(tmp_path, *words, **settings):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "end"), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **settings)


def test_a_reader_that_leaves_ends_no_run(tmp_path):
    process = start(tmp_path)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0 and (tmp_path / "end").read_text() == "False"


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_closed_terminal_is_a_wish_to_end_unless_that_is_ignored(is_ignored, tmp_path):
    ours, theirs = os.openpty()
    action = signal.SIG_IGN if is_ignored else signal.SIG_DFL
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "end"), "told"], stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGHUP, action),
    )  # fmt: skip
    os.close(theirs)
    while b"begun" not in os.read(ours, 1000):
        pass
    os.close(ours)  # whatever is written there now fails
    assert process.wait(60) == 0 and (tmp_path / "end").read_text() == str(not is_ignored)


LAUNCHER = """
import signal, sys
from megadit.models.megatron.launch import launch
if sys.argv.pop(1) == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
sys.exit(launch("rank_program", sys.argv[1:], num_processes=2))
"""
RANK = """
import os, pathlib, signal, sys, time
from megadit.models.shared.cli.command import StopRequest, end_with_parent
end_with_parent()
with StopRequest() as stop:
    path = pathlib.Path(sys.argv[1]) / f"rank{os.environ['RANK']}"
    def tell(path, number):
        path.with_suffix(".new").write_text(str(number))
        path.with_suffix(".new").rename(path)  # whoever sees the file sees all of it
    tell(path, os.getpid())
    while not stop.has_come:
        time.sleep(0.02)
    tell(path.with_suffix(".told"), stop.signal)
sys.exit(128 + stop.signal)
"""


@pytest.fixture
def start_launcher(start_ranks, tmp_path, monkeypatch):
    """start_launcher(how): one of two ranks, once both have begun; `how` may be "nohup"."""
    (tmp_path / "rank_program.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(how=""):
        (launcher,) = start_ranks(1, "-c", LAUNCHER, how, tmp_path)
        while len(list(tmp_path.glob("rank?"))) < 2:
            assert launcher.poll() is None, launcher.communicate()[0]
            time.sleep(0.02)
        return launcher

    return start


def what_ranks_were_told(folder):
    deadline = time.monotonic() + 60
    while len(told := [path.read_text() for path in folder.glob("*.told")]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return set(map(int, told))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_ranks_end_with_their_launcher(number, start_launcher, tmp_path):
    launcher = start_launcher()
    launcher.send_signal(number)
    assert launcher.wait(120) == (-number if number == signal.SIGKILL else 128 + number)
    assert what_ranks_were_told(tmp_path) == {signal.SIGTERM if number == signal.SIGKILL else number}


def test_a_launcher_under_nohup_outlives_its_terminal(start_launcher, tmp_path):
    """Of two signals the first is what a process says that it was told."""
    launcher = start_launcher("nohup")
    for pid in (launcher.pid, *(int(path.read_text()) for path in tmp_path.glob("rank?"))):
        os.kill(pid, signal.SIGHUP)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(120) == 128 + signal.SIGTERM
    assert what_ranks_were_told(tmp_path) == {signal.SIGTERM}


def test_a_step_in_a_process_of_its_own_ends_as_its_parent_is_told(tmp_path):
    (tmp_path / "step.py").write_text(RANK.replace("os.environ['RANK']", "0"))
    program = """
import sys
from megadit.models.shared.cli.command import run_command, run_module
sys.exit(run_command(lambda argv: run_module("step", *argv), sys.argv[1:]))
"""
    for number, code in ((signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)):
        for path in tmp_path.glob("rank0*"):
            path.unlink()
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(tmp_path)}
        )
        while not list(tmp_path.glob("rank0")):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(60) == code
        while not list(tmp_path.glob("rank0.told")):
            time.sleep(0.02)
    assert json.loads((tmp_path / "rank0.told").read_text()) == signal.SIGTERM
