"""Atomic folders: complete and synced to disk, or absent, whenever a run is killed."""

import errno
import shutil
from pathlib import Path

from megadit.train.checkpoints.writer import sync

DISK_FULL = "the disk is full"
UNFINISHED = ".unfinished"
"""Suffix of a checkpoint that is being written or deleted; a starting run removes leftovers."""


def unfinished_name(path: Path) -> Path:
    """The name of a checkpoint while it is being written."""
    return path.with_name(path.name + UNFINISHED)


def publish(unfinished: Path, path: Path) -> None:
    """Rename a finished directory to its final name, once its contents are synced to disk."""
    for file in unfinished.rglob("*"):
        sync(file)
    sync(unfinished)
    if path.exists():  # saved at this step before: the run was continued from an older checkpoint
        shutil.rmtree(path)
    unfinished.rename(path)
    sync(path.parent)


def delete(folder: Path) -> None:
    """Delete a folder; if killed here, it is still complete or no longer has its name."""
    shutil.rmtree(folder.rename(unfinished_name(folder)), ignore_errors=True)


def reason_of(error: Exception, folder: Path) -> str:
    """Describe why reading or writing failed: the cause in a chain of exceptions."""
    causes = [error, *getattr(error, "failures", {}).values()]
    while causes:
        cause = causes.pop(0)
        cause = cause[0] if isinstance(cause, tuple) else cause  # torch wraps (exception, traceback)
        if isinstance(cause, OSError):
            return DISK_FULL if cause.errno in (errno.ENOSPC, errno.EDQUOT) else str(cause.strerror or cause)
        causes += [nested for nested in (cause.__cause__, cause.__context__) if nested is not None]
    if shutil.disk_usage(folder).free < 2**20:  # torch's writer only notes that its file is too short
        return DISK_FULL
    if "unexpected pos" in str(error):  # the same, with room on the disk
        return "a file was cut off, as by a quota or a limit of this shell (ulimit -f)"
    return str(error).strip().splitlines()[-1]
