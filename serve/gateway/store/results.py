"""Storage of videos until they expire: a folder, or any URL of fsspec (s3://, gs://, abfs://, ...).

A file is named by its job and its write, both generated here: nothing that a client sends becomes part of a path, and a
gateway that returns to a job that another has finished does not touch its files.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import fsspec

from megadit.models.shared.addresses import check_no_secret, shown
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path
from megadit.serve.gateway.store.jobs import Job, Result

SUFFIXES = {"video/mp4": ".mp4", "image/png": ".png"}
_CONDITIONING = ".given"
_SECONDS_OF_YOUTH = 600.0
_OWNER = ".megadit_store"
"""File with the id of the store that the videos belong to."""


class Results:
    """The stored videos."""

    def __init__(self, url: str) -> None:
        """Raises UserError for a storage that cannot be used."""
        check_no_secret(url, "results")
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
            self.is_local = "file" in (self._files.protocol if isinstance(self._files.protocol, tuple) else ())
            if self.is_local:
                Path(self._root).mkdir(mode=0o700, parents=True, exist_ok=True)
        except (ValueError, ImportError, OSError) as error:
            raise UserError(f"results cannot be kept at {shown(url)!r}: {shown(str(error))}") from None

    def claim(self, store_id: str, knows: Callable[[str], bool]) -> None:
        """Binds this storage to one store, whose jobs decide what `sweep` removes.

        `knows` returns whether a job is in that store: a used storage is bound only if the store knows some of them.

        Raises:
            UserError: if it belongs to another store.
        """
        path = f"{self._root}/{_OWNER}"
        try:
            if not self._files.exists(path):
                jobs = [_job_id(name) for name in self._names()]
                if not jobs or any(map(knows, jobs)):
                    self._files.pipe_file(path, store_id.encode())
            owner = self._files.cat_file(path).decode() if self._files.exists(path) else None
        except Exception as error:  # fsspec's file systems raise what their libraries do
            raise UserError(f"results cannot be kept at {shown(self._root)!r}: {shown(str(error))}") from None
        if owner != store_id:
            raise UserError(
                f"{shown(self._root)} holds the videos of another job store; give another --results, or "
                f"that store's --store"
            )

    def put(self, job_id: str, data: bytes, media_type: str) -> Result:
        """Stores a video atomically, under a unique name. Raises OSError if there is no free space, or the storage does
        not respond."""
        return self._put(job_id, data, media_type, SUFFIXES[media_type])

    def put_conditioning(self, job_id: str, data: bytes) -> Result:
        """Store the conditioning media of a waiting video, as `put` does."""
        return self._put(job_id, data, "application/zip", _CONDITIONING)

    def _put(self, job_id: str, data: bytes, media_type: str, suffix: str) -> Result:
        name = f"{job_id}.{secrets.token_hex(8)}{suffix}"
        path = f"{self._root}/{name}"
        if self.is_local:
            with atomic_path(path) as temporary:
                with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
        else:
            self._files.pipe_file(path, data)  # an object store shows only complete objects
        return Result(name=name, media_type=media_type, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def open(self, job: Job) -> IO[bytes] | None:
        """Open the video of a completed job; None if it is missing, or has another size than was written."""
        path = f"{self._root}/{job.result_name}"
        try:
            return self._files.open(path, "rb") if self._files.size(path) == job.num_bytes else None
        except FileNotFoundError:
            return None

    def conditioning(self, job: Job) -> bytes:
        """Read the conditioning media of a job; fsspec's file systems raise any exception."""
        return self._files.cat_file(f"{self._root}/{job.conditioning_name}")

    def remove(self, name: str | None) -> None:
        """Removes a stored video; None, for a job without one, does nothing."""
        if name is None:
            return
        try:
            self._files.rm_file(f"{self._root}/{name}")
        except FileNotFoundError:
            pass

    def sweep(self, is_needed: Callable[[str, str], bool]) -> int:
        """Removes leftovers of crashes, including incomplete files; returns their number.

        `is_needed` is called for each with the id of its job and its name.
        """
        removed = 0
        for name in self._names():
            if not is_needed(_job_id(name), name) and not (name.endswith(_CONDITIONING) and self._is_young(name)):
                self.remove(name)
                removed += 1
        return removed

    def _is_young(self, name: str) -> bool:
        """Whether a file may belong to a job that another gateway is about to store."""
        try:
            age = datetime.now(UTC) - self._files.modified(f"{self._root}/{name}")
        except (FileNotFoundError, NotImplementedError):
            return False
        return age.total_seconds() < _SECONDS_OF_YOUTH

    def _names(self) -> list[str]:
        """File names of all videos, including incomplete ones."""
        try:
            paths = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            paths = []  # an object store has no empty folders
        self._files.invalidate_cache()  # other gateways write there, too
        names = (path.rpartition("/")[2] for path in paths)
        return [name for name in names if _job_id(name).startswith("video_")]

    def free_bytes(self) -> float:
        """Free space in bytes; infinite if unknown."""
        return shutil.disk_usage(self._root).free if self.is_local else float("inf")


def _job_id(name: str) -> str:
    """Id of the job that a file is named after."""
    return name.lstrip(".").partition(".")[0]
