"""Background writing of a checkpoint's tensors, into a folder that is complete and synced to disk, or absent, whenever
a run is killed."""

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megadit.models.megatron.integrity import checksums
from megadit.models.shared.resources import memory_in_words

DISK_FULL = "the disk is full"
UNFINISHED = ".unfinished"
"""Suffix of a checkpoint that is being written or deleted; a starting run removes leftovers."""


class BackgroundWrite:
    """Thread that writes the files of one rank, and computes their checksums while they are in memory.

    It writes copies of the tensors, so that training can go on.
    """

    def __init__(self, request: AsyncRequest, directory: Path, prefix: str) -> None:
        """`request`: Megatron's; names of the files that it writes into `directory` begin with `prefix`."""
        self._request, self._directory, self._prefix = request, directory, prefix
        self._arguments = list(request.async_fn_args)
        if request.preload_fn is not None:  # a new thread's GPU is 0, where each rank would open a context
            self._arguments[1] = request.preload_fn()
        self._error: Exception | None = None
        self._sums: dict[str, str] = {}
        self._thread = Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> dict[str, str]:
        """Wait for the files, and complete the checkpoint; every rank calls this.

        Returns:
            the checksum of each file, by its name in `directory`.

        Raises:
            OSError, CheckpointException: if writing failed.
        """
        self._thread.join()
        for finalize in self._request.finalize_fns:  # fails on all ranks if writing failed on one
            finalize()
        if self._error is not None:
            raise self._error
        return self._sums

    def _write(self) -> None:
        try:
            if self._request.async_fn is not None:  # of few tensors some ranks have none
                self._request.async_fn(*self._arguments, **self._request.async_fn_kwargs)
            names = sorted(path.name for path in self._directory.glob(f"{self._prefix}*"))
            for name in names:
                sync(self._directory / name)
            self._sums = checksums(self._directory, names)
        except Exception as error:  # raised in `finish`, which all ranks call
            self._error = error


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def space_left(root: Path, kept: Sequence[Path]) -> str:
    """Describe the free space of the disk and the size of a checkpoint."""
    left = f"{memory_in_words(shutil.disk_usage(root).free)} are left"
    sizes = [sum(file.stat().st_size for file in each.rglob("*") if file.is_file()) for each in kept]
    return f"{left}, and a checkpoint takes {memory_in_words(sizes[0])}" if sizes else left
