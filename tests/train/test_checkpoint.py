"""What a checkpoint's writer says of a failure."""

import errno
import shutil
from collections import namedtuple

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megadit.train.checkpoint import _reason


def full_disk():
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError as error:
        return error


@pytest.mark.parametrize(
    "error", [full_disk(), CheckpointException("write", {1: (full_disk(), None)}), OSError(errno.EDQUOT, "quota")]
)
def test_a_full_disk_is_called_so_from_any_depth(error, tmp_path):
    assert _reason(error, tmp_path) == "the disk is full"


def test_a_full_disk_that_torch_did_not_recognise(tmp_path, monkeypatch):
    error = CheckpointException("write", {0: (RuntimeError("unexpected pos 704 vs 598"), None)})
    assert "unexpected pos" in _reason(error, tmp_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 100, 0))
    assert _reason(error, tmp_path) == "the disk is full"


def test_another_failure_is_told_as_it_is(tmp_path):
    assert _reason(PermissionError(errno.EACCES, "Permission denied"), tmp_path) == "Permission denied"
