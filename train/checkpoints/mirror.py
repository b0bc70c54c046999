"""Second copies of checkpoints, at any fsspec URL: s3://bucket/run, gs://..., a folder on another disk.

A thread copies while training goes on. The list of checksums is copied last: a copy without it is incomplete, and one
with it is verified file by file when it is fetched.
"""

import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from megadit.models.megatron.integrity import SUMS, file_names
from megadit.models.shared.addresses import check_no_secret
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import inner_path

Checkpoint = TypeVar("Checkpoint")


def check_url(url: str | None) -> None:
    """Raises UserError if fsspec does not support this URL, lacks a library for it, or if it contains a password."""
    if url is None:
        return
    check_no_secret(url, "checkpoint.copy_to")
    from fsspec import get_filesystem_class
    from fsspec.core import split_protocol

    try:
        get_filesystem_class(split_protocol(url)[0] or "file")
    except (ImportError, ValueError) as error:
        raise UserError(f"checkpoint.copy_to={url} cannot be used: {error}") from error


def outdated(complete: Sequence[Checkpoint], written: Checkpoint, keep_last: int) -> Sequence[Checkpoint]:
    """Select the checkpoints of `complete` to delete, oldest first: those before `written`, except the last `keep_last`
    (which include `written`).

    Later steps do not count: they are damaged, or the run has rolled back beyond them.
    """
    return complete[: complete.index(written) + 1][:-keep_last]


class SecondCopy:
    """Copies of the checkpoints of one run at a URL; used by the first rank alone."""

    @classmethod
    def at(cls, url: str | None) -> "SecondCopy | None":
        return None if url is None else cls(url)

    def __init__(self, url: str) -> None:
        """Raises UserError if the URL cannot be used."""
        from fsspec.core import url_to_fs

        self.url = url
        try:
            self._files, root = url_to_fs(url)
            self._root = PurePosixPath(root)
            self._files.makedirs(str(self._root), exist_ok=True)
        except (ImportError, ValueError, OSError) as error:
            raise UserError(f"checkpoint.copy_to={url} cannot be used: {error}") from error
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="second copy")
        self._running: tuple[str, Future] | None = None

    def names(self) -> list[str]:
        """The complete copies, oldest first."""
        self._files.invalidate_cache()
        complete = self._files.glob(str(self._root / "iter_*" / SUMS))
        return sorted((PurePosixPath(path).parent.name for path in complete), key=lambda name: (len(name), name))

    def start(self, path: Path, *, keep_last: int, preserved: str | None = None) -> None:
        """Copy a checkpoint in the background, then delete `outdated` copies, except `preserved`."""
        self.finish()
        self._running = path.name, self._thread.submit(self._copy, path, keep_last, preserved)

    def finish(self) -> None:
        """Wait for the copy in progress; a failure is only printed, because the checkpoint itself exists."""
        if self._running is None:
            return
        (name, future), self._running = self._running, None
        if (error := future.exception()) is not None:
            print(f"no second copy of {name} at {self.url}: {error}", file=sys.stderr, flush=True)

    def fetch(self, name: str, root: Path, unfinished: Path) -> Path:
        """Fetch the copy `name` to a directory in `root`, named `unfinished` until it is complete. Raises UserError if
        it cannot be read."""
        print(f"fetching {name} from {self.url}", flush=True)
        shutil.rmtree(unfinished, ignore_errors=True)
        source = str(self._root / name)
        try:
            for file in self._files.find(source):
                target = inner_path(unfinished, file.removeprefix(f"{source}/"))
                target.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(file, str(target))
        except OSError as error:
            raise UserError(f"checkpoint.copy_to={self.url}: {name} cannot be fetched: {error}") from error
        return unfinished.rename(root / name)

    def _copy(self, path: Path, keep_last: int, preserved: str | None) -> None:
        target = self._root / path.name
        self._remove(target)
        for name in [*file_names(path), SUMS]:
            self._files.makedirs(str((target / name).parent), exist_ok=True)
            self._files.put_file(str(path / name), str(target / name))
        for old in outdated(self.names(), path.name, keep_last):
            if old != preserved:
                self._remove(self._root / old)

    def _remove(self, directory: PurePosixPath) -> None:
        """Delete a copy, its list of checksums first: copies with a list are complete."""
        files: Any = self._files
        if files.exists(str(directory)):
            if files.exists(str(directory / SUMS)):
                files.rm_file(str(directory / SUMS))
            files.rm(str(directory), recursive=True)
