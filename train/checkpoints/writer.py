"""Background writing of a checkpoint's tensors."""

import os
from pathlib import Path
from threading import Thread

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megadit.models.megatron.integrity import checksums


class BackgroundWrite:
    """Thread that writes the files of one rank, and computes their checksums while they are in memory.

    It writes copies of the tensors, so that training can go on.
    """

    def __init__(self, request: AsyncRequest, directory: Path, prefix: str) -> None:
        """`request`: Megatron's; names of the files that it writes into `directory` begin with `prefix`."""
        self._request, self._directory, self._prefix = request, directory, prefix
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
            arguments = list(self._request.async_fn_args)
            if self._request.preload_fn is not None:
                arguments[1] = self._request.preload_fn()
            self._request.async_fn(*arguments, **self._request.async_fn_kwargs)
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
