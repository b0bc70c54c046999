"""Folders that are whole or absent, and on the disk, whenever a run is killed."""

import errno
import shutil
from pathlib import Path

from megadit.train.checkpoints.writer import sync

UNFINISHED = ".unfinished"
"""Suffix of a checkpoint that is being written or deleted; a run that starts removes such leftovers."""


def unfinished_name(path: Path) -> Path:
    """The name of a checkpoint while it is being written."""
    return path.with_name(path.name + UNFINISHED)


def publish(unfinished: Path, path: Path) -> None:
    """Gives a finished directory its name, once its contents are on the disk."""
    for file in unfinished.rglob("*"):
        sync(file)
    sync(unfinished)
    if path.exists():  # saved at this step before, by a run that was continued from an older checkpoint
        shutil.rmtree(path)
    unfinished.rename(path)
    sync(path.parent)


def delete(folder: Path) -> None:
    """Whole or gone, also if killed here."""
    shutil.rmtree(folder.rename(unfinished_name(folder)), ignore_errors=True)


def reason_of(error: Exception, folder: Path) -> str:
    """Describe why reading or writing failed, by the cause in a chain of exceptions."""
    causes = [error, *getattr(error, "failures", {}).values()]
    while causes:
        cause = causes.pop(0)
        cause = cause[0] if isinstance(cause, tuple) else cause  # torch wraps (exception, traceback)
        if isinstance(cause, OSError):
            return "the disk is full" if cause.errno in (errno.ENOSPC, errno.EDQUOT) else str(cause.strerror or cause)
        causes += [nested for nested in (cause.__cause__, cause.__context__) if nested is not None]
    if shutil.disk_usage(folder).free < 2**20:  # torch's writer only knows that its file is shorter than it should be
        return "the disk is full"
    return str(error).strip().splitlines()[-1]
