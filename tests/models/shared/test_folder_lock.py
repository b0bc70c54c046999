"""One writer of a folder: in real processes, stopped, killed, and as if on another machine."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image

from megadit.models.shared import folder_lock
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import held_alone
from megadit.models.shared.folder_lock import FILE, FolderLock
from megadit.train.data.prepare import command as prepare
from megadit.train.distill import command as distill
from megadit.train.reward import command as reward
from megadit.train.slurm import __main__ as slurm

HOLDER = """
import sys, time
from megadit.models.shared import folder_lock
folder_lock._BEAT_SECONDS = 0.05
with folder_lock.FolderLock(sys.argv[1], "trains"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch):
    monkeypatch.setattr(folder_lock, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(folder_lock, "_SILENT_SECONDS", 0.5)


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_writer_is_refused_and_told_of_the_first(tmp_path, holder):
    with pytest.raises(
        UserError, match=f"in use: process {holder.pid} on .* trains there since .*kill {holder.pid}.*rm .*{FILE}"
    ):
        FolderLock(tmp_path / "run", "trains").__enter__()
    holder.communicate("")
    with FolderLock(tmp_path / "run", "trains"):
        pass
    assert not (tmp_path / "run").exists(), "what it made for nothing is gone"


def test_each_command_that_writes_a_folder_for_long_has_it_alone(tmp_path, capsys):
    """Training, export and evaluation: train/test_left_alone.py, export/test_export.py, evaluate/test_command.py."""
    (tmp_path / "pictures").mkdir()
    Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)).save(tmp_path / "pictures/a.png")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "scorer").mkdir()
    (tmp_path / "scorer/scorer.py").touch()
    out, tokenizer = str(tmp_path / "out"), ["--sizes", "64x64", "--num_workers", "0", "--channels", "16"]
    scoring = ["--prompts", str(tmp_path / "a.txt"), "--scorer_dir", str(tmp_path / "scorer")]
    for main, path, words in (
        (distill.main, None, ["bundle", out, "--data", "data"]),
        (reward.main, None, ["bundle", out, *scoring]),
        (slurm.main, None, [f"folder={out}", "cluster.gpus_per_node=0", "stages.a.command=ls", "--local"]),
        (prepare.main, tmp_path / ".out.lock", ["images", str(tmp_path / "pictures"), out, *tokenizer]),
        (prepare.main, tmp_path / ".out.lock", ["digits", out]),
    ):
        with FolderLock(out, "works", path=path):
            assert main(words) == 2
            error = capsys.readouterr().err
        assert f"{out} is in use: process {os.getpid()} on" in error and error.count("\n") == 1, (words, error)


def test_a_killed_holder_is_followed_at_once(tmp_path, holder, capsys):
    holder.kill()
    holder.wait()
    with FolderLock(tmp_path / "run", "trains"):
        assert f"taken over from process {holder.pid}" in capsys.readouterr().out
    assert list((tmp_path / "run").iterdir()) == []


def test_a_suspended_holder_whose_folder_was_taken_ends_when_it_wakes(tmp_path, holder):
    holder.send_signal(signal.SIGSTOP)
    (tmp_path / "run" / FILE).unlink()
    with FolderLock(tmp_path / "run", "trains") as lock:
        record = (tmp_path / "run" / FILE).read_text()
        holder.send_signal(signal.SIGCONT)
        assert holder.wait(60) == folder_lock.LOST_CODE
        told = holder.stderr.read()
        assert f"process {os.getpid()}" in told and "writes nothing more" in told
        lock.check()
        assert json.loads((tmp_path / "run" / FILE).read_text())["token"] == json.loads(record)["token"]


def test_a_holder_on_another_machine_is_refused_while_it_beats_and_followed_when_silent(tmp_path, capsys, monkeypatch):
    (tmp_path / "run").mkdir()
    lock = FolderLock(tmp_path / "run", "trains")
    folder_lock._write(
        tmp_path / "run" / FILE, lock._record | {"token": "other", "kernel": ["another"], "host": "node7"}
    )
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(0.02):
            beats = json.loads((tmp_path / "run" / FILE).read_text())
            folder_lock._write(tmp_path / "run" / FILE, beats | {"beats": beats["beats"] + 1})

    thread = threading.Thread(target=beat)
    thread.start()
    with monkeypatch.context() as patch, pytest.raises(UserError, match="node7"):
        patch.setattr(folder_lock, "_SILENT_SECONDS", 300.0)
        lock.__enter__()
    is_over.set()
    thread.join()
    with lock:
        said = capsys.readouterr().out
        assert "waiting to see whether" in said and "taken over" in said


@pytest.mark.parametrize("content", ["", "{", "[]", '{"token": 1}'])
def test_a_damaged_lock_is_replaced(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with FolderLock(tmp_path, "trains"):
        assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("years", [-1, 1])
def test_what_a_killed_process_left_of_taking_over_goes_whatever_the_clock_says(tmp_path, years):
    (tmp_path / FILE).write_text("{")
    guard = tmp_path / f".{FILE}.removing"
    guard.touch()
    os.utime(guard, (then := time.time() + years * 31_536_000, then))
    with FolderLock(tmp_path, "trains"):
        assert not guard.exists()


def test_of_many_at_once_one_holds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "_SILENT_SECONDS", 300.0)  # who waits for its turn is not gone
    (tmp_path / FILE).write_text(
        json.dumps(
            {"token": "old", "pid": 0, "host": "x", "beats": 0, "job": None}
            | {"kernel": folder_lock._kernel(), "process": "1"}
        )
    )
    held, refused, start = [], [], threading.Barrier(16)

    def take() -> None:
        start.wait()
        try:
            held.append(FolderLock(tmp_path, "trains").__enter__())
        except UserError:
            refused.append(1)

    threads = [threading.Thread(target=take) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(held), len(refused)) == (1, 15)
    held[0].__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == []


def test_who_found_nothing_there_takes_nothing_away(tmp_path, monkeypatch):
    """Another has put its file there since."""

    def read_late(path):
        path.write_text("another's")

    monkeypatch.setattr(folder_lock, "_read", read_late)
    FolderLock(tmp_path, "trains")._remove(None)
    assert (tmp_path / FILE).read_text() == "another's"


def test_a_full_disk_or_a_short_outage_loses_nothing(tmp_path, monkeypatch):
    with FolderLock(tmp_path, "trains") as lock:
        monkeypatch.setattr(folder_lock, "_write", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full")))
        monkeypatch.setattr(folder_lock, "_read", lambda _: (_ for _ in ()).throw(OSError(5, "away")))
        time.sleep(0.2)
        lock.check()
        monkeypatch.undo()


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EIO])
def test_a_lock_that_cannot_be_written_names_a_remedy(number, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fail)
    remedy = "raise the limit" if number == errno.EFBIG else "give another path"
    for lock in (FolderLock(tmp_path, "trains"), held_alone(tmp_path / "lock")):
        with pytest.raises(UserError, match=f"{tmp_path}/.*(; .*{remedy})"), lock:
            pass
