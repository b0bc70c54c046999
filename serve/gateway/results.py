"""Where videos are kept until they expire: a folder, or any URL that fsspec knows (s3://, gs://, abfs://, ...).

A file has the name of its job, which is ours alone to choose: nothing that a client sends becomes part of a path.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

import fsspec

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path
from megadit.serve.gateway.store import Job, Result

SUFFIXES = {"video/mp4": ".mp4", "image/png": ".png"}


class Results:
    """The stored videos."""

    def __init__(self, url: str) -> None:
        """Raises:
        UserError: for a place that cannot be used.
        """
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
            self.is_local = "file" in (self._files.protocol if isinstance(self._files.protocol, tuple) else ())
            if self.is_local:
                Path(self._root).mkdir(parents=True, exist_ok=True)
        except (ValueError, ImportError, OSError) as error:
            raise UserError(f"results cannot be kept at {url!r}: {error}") from error

    def put(self, job_id: str, data: bytes, media_type: str) -> Result:
        """Stores a video, whole or not at all.

        Raises:
            OSError: if there is no room, or the place does not answer.
        """
        path = self._path(job_id, media_type)
        if self.is_local:
            with atomic_path(path) as temporary, temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        else:
            self._files.pipe_file(path, data)  # an object store shows no object before it is whole
        return Result(media_type=media_type, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def open(self, job: Job) -> IO[bytes] | None:
        """The video of a completed job, to be read; None if it is not there, or not of the size that was written."""
        path = self._path(job.id, job.media_type)
        try:
            return self._files.open(path, "rb") if self._files.size(path) == job.num_bytes else None
        except FileNotFoundError:
            return None

    def remove(self, job_id: str) -> None:
        """Removes whatever is stored of a job."""
        for media_type in SUFFIXES:
            try:
                self._files.rm_file(self._path(job_id, media_type))
            except FileNotFoundError:
                pass

    def sweep(self, is_wanted: Callable[[str], bool]) -> int:
        """Removes what crashes left: files of jobs that are not wanted, half written ones too; returns how many."""
        removed = 0
        try:
            paths = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            paths = []  # an object store has no folder before there is something in it
        self._files.invalidate_cache()  # others write there, too
        for path in paths:
            name = path.rpartition("/")[2]
            job_id = name.lstrip(".").partition(".")[0]
            if job_id.startswith("video_") and not is_wanted(job_id):
                self._files.rm_file(f"{self._root}/{name}")
                removed += 1
        return removed

    def free_bytes(self) -> float:
        """Room that is left; infinite where nobody can tell."""
        return shutil.disk_usage(self._root).free if self.is_local else float("inf")

    def _path(self, job_id: str, media_type: str) -> str:
        return f"{self._root}/{job_id}{SUFFIXES[media_type]}"
