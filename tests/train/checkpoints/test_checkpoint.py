"""What a checkpoint's writer says of a failure."""

import errno
import os
import shutil
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megadit.models.megatron.checkpoint import CONFIG, DESCRIPTION, STATE, SUMS, TENSORS, find_checkpoints
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json
from megadit.train.checkpoints.checkpoint import CheckpointStore, _delete_old
from megadit.train.checkpoints.fixed_settings import _differ
from megadit.train.checkpoints.writer import reason_of


def full_disk():
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError as error:
        return error


@pytest.mark.parametrize(
    "error", [full_disk(), CheckpointException("write", {1: (full_disk(), None)}), OSError(errno.EDQUOT, "quota")]
)
def test_a_full_disk_is_called_so_from_any_depth(error, tmp_path):
    assert reason_of(error, tmp_path) == "the disk is full"


def test_a_full_disk_that_torch_did_not_recognise(tmp_path, monkeypatch):
    error = CheckpointException("write", {0: (RuntimeError("unexpected pos 704 vs 598"), None)})
    assert "ulimit -f" in reason_of(error, tmp_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 100, 0))
    assert reason_of(error, tmp_path) == "the disk is full"


@pytest.mark.parametrize(
    ("number", "told"),
    [(errno.ENOSPC, "(the disk is full); there is none yet. Free some space"), (errno.EMFILE, "Cor")],
)
def test_only_a_full_disk_needs_space(tmp_path, monkeypatch, number, told):
    monkeypatch.setattr(dist, "all_gather_object", lambda problems, problem: problems.__setitem__(0, problem))
    store = SimpleNamespace(root=tmp_path, _groups=SimpleNamespace(world_size=1, is_first=True))
    with (
        pytest.raises(UserError) as raised,
        CheckpointStore._all_or_nothing(store, tmp_path / "iter_0000002.unfinished"),
    ):
        raise OSError(number, os.strerror(number))
    assert told in str(raised.value) and ("Free" in told) == ("Free" in str(raised.value))


def test_another_failure_is_told_as_it_is(tmp_path):
    assert reason_of(PermissionError(errno.EACCES, "Permission denied"), tmp_path) == "Permission denied"


def test_a_setting_that_came_later_refuses_no_resume():
    before = {"teacher": "one", "sigmas": [80.0]}
    assert not _differ(before, before | {"teacher_adapter": None}) and not _differ(None, None)
    assert _differ(before, before | {"sigmas": [70.0]}) and _differ(before, None) and _differ(None, before)


def complete(root, step):
    path = root / f"iter_{step:07d}"
    (path / TENSORS).mkdir(parents=True)
    write_json(path / STATE, {"run": {"iteration": step}, "ema_sigma_rels": []})
    for part in (CONFIG, SUMS, f"{TENSORS}/{DESCRIPTION}"):
        (path / part).touch()
    return path


def test_a_damaged_later_checkpoint_is_not_among_those_to_keep(tmp_path):
    # iter 9 is damaged: its run has gone on from 2
    written = [complete(tmp_path, step) for step in (1, 2, 9, 4)]
    _delete_old(written[-1], keep_last=2)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["iter_0000002", "iter_0000004", "iter_0000009"]
    _delete_old(written[-1], keep_last=1)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["iter_0000004", "iter_0000009"]


def test_what_cannot_be_deleted_does_not_end_a_run(tmp_path, monkeypatch):
    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy")

    written = [complete(tmp_path, step) for step in (1, 2)]
    monkeypatch.setattr(shutil, "rmtree", busy)
    _delete_old(written[-1], keep_last=1)
    assert find_checkpoints(tmp_path) == written[1:]
