"""Damaged checkpoints are passed over, a full disk leaves the last good one, and a lost folder comes back."""

import os
import random
import shutil
import subprocess
import sys

import pytest

from megadit.models.megatron.checkpoint import check_checkpoint, find_checkpoints
from megadit.models.megatron.integrity import DamagedCheckpointError

pytestmark = pytest.mark.slow
ARGUMENTS = (
    *("--recipe", "digits_tiny", "--mock", "train.train_iters=8", "validation.interval=0", "optimizer.lr=0.002"),
    *("checkpoint.save_interval=2", "checkpoint.keep_last=9", "logger.tensorboard=false"),
)
WITH_A_LIMIT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
from megadit.train.__main__ import main
raise SystemExit(main(sys.argv[1:]))
"""
"""A rank whose large writes fail, by a limit of its shell."""


def arguments(out, *more):
    return ("-m", "megadit.train", *ARGUMENTS, f"train.output_dir={out}", *more)


@pytest.fixture(scope="module")
def finished(run_ranks, tmp_path_factory):
    """A run of 8 steps on two ranks, with a second copy of its checkpoints."""
    root = tmp_path_factory.mktemp("finished")
    run_ranks(2, *arguments(root / "run", f"checkpoint.copy_to=file://{root / 'copy'}", "checkpoint.keep_last=4"))
    return root


@pytest.fixture
def cut_short(finished, tmp_path):
    """The same run, as it was after step 6."""
    shutil.copytree(finished / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "iter_0000008")
    return tmp_path / "run"


def test_a_damaged_checkpoint_is_named_and_passed_over(finished, cut_short, run_ranks, read_metrics, same):
    newest, older = (cut_short / "checkpoints" / name for name in ("iter_0000006", "iter_0000004"))
    file = max((newest / "tensors").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[random.Random(0).randrange(len(content))] ^= 4
    file.write_bytes(content)
    (older / "config.yaml").unlink()
    output = run_ranks(2, *arguments(cut_short))[0]
    assert f"{newest} is damaged: tensors/{file.name} is not what was written" in output
    assert f"{older} is damaged: config.yaml is missing" in output
    assert f"continuing from {cut_short / 'checkpoints' / 'iter_0000002'}" in output
    assert same(read_metrics(cut_short), read_metrics(finished / "run"))
    check_checkpoint(newest)  # written again


def test_nothing_whole_is_no_reason_to_start_anew(cut_short, run_ranks):
    for path in find_checkpoints(cut_short / "checkpoints"):
        (path / "SHA256SUMS").write_text("")
        with pytest.raises(DamagedCheckpointError):
            check_checkpoint(path)
    outputs = run_ranks(2, *arguments(cut_short), code=2)
    assert sum(output.count("error: no checkpoint in") for output in outputs) == 1
    assert not any("Traceback" in output for output in outputs)
    assert len(find_checkpoints(cut_short / "checkpoints")) == 3


def test_a_failed_write_leaves_the_last_good_checkpoint(cut_short, run_ranks):
    outputs = run_ranks(2, "-c", WITH_A_LIMIT, *arguments(cut_short)[2:], code=2)
    errors = [line for output in outputs for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "iter_0000008 could not be written to" in errors[0]
    assert "(ulimit -f)); iter_0000006 is kept. Correct this and run the same command to continue" in errors[0]
    left = sorted(path.name for path in (cut_short / "checkpoints").iterdir())
    assert left == ["iter_0000002", "iter_0000004", "iter_0000006"]
    check_checkpoint(cut_short / "checkpoints" / "iter_0000006")


ON_A_SMALL_DISK = r"""
set -e
disk=$1 size=$2 run=$3 left=$4; shift 4
mount -t tmpfs -o size=$size none $disk
cp -r $run/. $disk
code=0; "$@" train.output_dir=$disk || code=$?
cp -r $disk $left
exit $code
"""
"""Runs a command whose run lies on a disk of its own, which is gone afterwards; what it held is left elsewhere."""


@pytest.fixture(scope="module")
def own_mounts(tmp_path_factory):
    """The command that lets another mount disks which nobody else sees."""
    place = tmp_path_factory.mktemp("disk")
    for command in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        probe = [*command, "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
        if shutil.which("unshare") and subprocess.run(probe, capture_output=True).returncode == 0:
            return command
    pytest.skip("no disk can be mounted here")


def test_a_disk_that_is_full_leaves_the_last_good_checkpoint(
    finished, cut_short, own_mounts, run_ranks, tmp_path, read_metrics, same
):
    checkpoints = cut_short / "checkpoints"
    room = size_of(cut_short) + size_of(checkpoints / "iter_0000006") // 2
    (tmp_path / "disk").mkdir()
    places = [str(tmp_path / "disk"), str(room), str(cut_short), str(tmp_path / "left")]
    command = [sys.executable, *arguments("later")[:-1]]
    done = subprocess.run(
        [*own_mounts, "sh", "-c", ON_A_SMALL_DISK, "sh", *places, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("error:"))
    assert "iter_0000008 could not be written to" in error and "(the disk is full); iter_0000006 is kept" in error
    assert "iB are left, and a checkpoint takes " in error
    left = tmp_path / "left"
    assert sorted(path.name for path in (left / "checkpoints").iterdir()) == [f"iter_{step:07d}" for step in (2, 4, 6)]
    run_ranks(2, *arguments(left))  # where there is room
    assert same(read_metrics(left), read_metrics(finished / "run"))


def size_of(folder):
    """Bytes of a folder in pages of memory, as its files lie on such a disk."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*"))


def test_a_lost_folder_comes_back_from_the_second_copy(finished, run_ranks, tmp_path, read_metrics, same):
    copy = tmp_path / "copy"
    shutil.copytree(finished / "copy", copy)
    assert sorted(path.name for path in copy.iterdir()) == [f"iter_{step:07d}" for step in (2, 4, 6, 8)]
    (copy / "iter_0000008" / "state.json").write_text("{}")
    output = run_ranks(2, *arguments(tmp_path / "run", f"checkpoint.copy_to=file://{copy}"))[0]
    assert "iter_0000008 is damaged: state.json is not what was written" in output
    assert f"continuing from {tmp_path / 'run' / 'checkpoints' / 'iter_0000006'}" in output
    assert same(read_metrics(tmp_path / "run"), read_metrics(finished / "run")[6:])
    check_checkpoint(copy / "iter_0000008")


def test_a_lost_folder_comes_back_from_s3(s3, run_ranks, tmp_path, read_metrics):
    url = f"{s3()}/run"
    more = (f"checkpoint.copy_to={url}", "train.train_iters=4")
    run_ranks(1, *arguments(tmp_path / "first", *more))
    (output,) = run_ranks(1, *arguments(tmp_path / "second", *more, "train.train_iters=6"))
    assert f"fetching iter_0000004 from {url}" in output
    assert [line["step"] for line in read_metrics(tmp_path / "second")] == [5, 6]


def test_another_run_is_continued_in_a_folder_of_its_own(finished, run_ranks, tmp_path, read_metrics):
    more = (f"checkpoint.load={finished / 'run'}", "train.train_iters=10")
    output = run_ranks(1, *arguments(tmp_path / "next", *more))[0]
    assert f"continuing from {finished / 'run' / 'checkpoints' / 'iter_0000008'}" in output
    assert [line["step"] for line in read_metrics(tmp_path / "next")] == [9, 10]
    output = run_ranks(1, *arguments(tmp_path / "next", *more, "train.train_iters=11"))[0]
    assert f"continuing from {tmp_path / 'next'}" in output
    assert [line["step"] for line in read_metrics(tmp_path / "next")] == [9, 10, 11]


def test_another_run_without_a_checkpoint_is_a_mistake(run_ranks, tmp_path):
    (output,) = run_ranks(1, *arguments(tmp_path / "next", f"checkpoint.load={tmp_path}"), code=2)
    assert output.splitlines()[-1].startswith(f"error: checkpoint.load={tmp_path} has no checkpoint")
    (tmp_path / "transformer").mkdir()
    (tmp_path / "megadit.json").write_text("{}")
    (output,) = run_ranks(1, *arguments(tmp_path / "next", f"checkpoint.load={tmp_path}"), code=2)
    assert f"a bundle has weights alone: checkpoint.init_from={tmp_path}" in output.splitlines()[-1]
