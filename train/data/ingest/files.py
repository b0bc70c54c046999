"""Files of a source: in a folder, or in any store that fsspec reaches (s3://BUCKET/PATH, gs://..., memory://...)."""

import io
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import inner_path, is_inner_name
from megadit.train.data.places import is_url

BLOCK_BYTES = 1 << 22
"""Read from a store at a time."""


class Folder(Protocol):
    """The files under one place. Their names are relative, with slashes."""

    def names(self) -> Iterator[str]:
        """All of them, in no order."""

    def holds(self, name: str) -> bool:
        """False for a name that leads out of the place, whether something is there or not."""

    def path(self, name: str) -> str | None:
        """What `open_file` takes; None if there is no such file."""


def open_folder(root: str | Path) -> Folder | None:
    """The files under a folder or URL; None if there is nothing.

    Raises:
        UserError: for a URL that cannot be reached.
    """
    if is_url(root):
        folder = StoredFolder(str(root))
        return folder if next(folder.names(), None) is not None else None
    return LocalFolder(Path(root)) if Path(root).is_dir() else None


class LocalFolder:
    """A `Folder` on disk."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def names(self) -> Iterator[str]:
        return (path.relative_to(self._root).as_posix() for path in self._root.rglob("*") if path.is_file())

    def holds(self, name: str) -> bool:
        try:
            return bool(inner_path(self._root, name))
        except UserError:
            return False

    def path(self, name: str) -> str | None:
        path = self._root / name
        return str(path) if path.is_file() else None


class StoredFolder:
    """A `Folder` in a store; its files are listed once."""

    def __init__(self, url: str) -> None:
        """Raises UserError if it cannot be listed."""
        store, root = _store(url)
        try:
            found = store.find(root)
        except Exception as error:  # each store has exceptions of its own
            raise UserError(f"{url} cannot be read: {error}") from error
        prefix = root.rstrip("/") + "/"
        self._paths = {path.removeprefix(prefix): store.unstrip_protocol(path) for path in found if path != root}

    def names(self) -> Iterator[str]:
        return iter(self._paths)

    def holds(self, name: str) -> bool:
        return is_inner_name(name)

    def path(self, name: str) -> str | None:
        return self._paths.get(str(PurePosixPath(name)))


def open_file(path: str) -> BinaryIO:
    """The bytes of a file on disk or at a URL; seekable.

    Raises:
        OSError: if it cannot be opened.
    """
    if not is_url(path):
        return open(path, "rb")
    store, inside = _store(path)
    return store.open(inside, "rb", block_size=BLOCK_BYTES)


def open_text(path: str) -> io.TextIOWrapper:
    """The same as UTF-8, its line ends as they are."""
    return io.TextIOWrapper(open_file(path), encoding="utf-8", newline="")


def file_size(file: BinaryIO) -> int:
    """Bytes of an open file, which is left at its beginning."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    return size


def _store(url: str) -> tuple[Any, str]:
    """(file system, path in it)."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url} cannot be reached: {error}; for s3:// install megadit[s3]") from None
