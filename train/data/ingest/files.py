"""Files of a source: in a folder, or in any store that fsspec reaches (s3://BUCKET/PATH, gs://..., memory://...)."""

import io
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import is_inner_name
from megadit.models.shared.outside import HIDDEN, Found, is_litter, walk
from megadit.train.data.places import is_url

BLOCK_BYTES = 1 << 22
"""Read from a store at a time."""


class Folder:
    """The files under one place, listed once. Their names are relative, with slashes."""

    def __init__(self, root: str, found: Iterable[Found], named: str = "") -> None:
        """`named`: how a user wrote `root`, with other links in it."""
        self.root = root
        self.roots = tuple(dict.fromkeys(filter(None, (root, named))))
        """Paths of the files begin with one of these, where a table has them whole."""
        self._files: set[str] = set()
        self.not_used: dict[str, str] = {}
        """Name -> why it is not read."""
        for each in found:
            if each.reason:
                self.not_used[each.name] = each.reason
            else:
                self._files.add(each.name)

    def names(self) -> Iterator[str]:
        """Names of all files that may be read, in no order."""
        return iter(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def holds(self, name: str) -> bool:
        """False for a name that leads out of the place, whether something is there or not."""
        return is_inner_name(name)

    def path(self, name: str) -> str | None:
        """Path for `open_file`; None if there is no such file, or it may not be read."""
        name = str(PurePosixPath(name))
        return f"{self.root}/{name}" if name in self._files else None

    @cached_property
    def by_last_name(self) -> dict[str, list[str]]:
        """The last part of a name -> the files that are called so."""
        found: dict[str, list[str]] = {}
        for name in self._files:
            found.setdefault(name.rpartition("/")[2], []).append(name)
        return found


def open_folder(root: str | Path, *, follow_links: bool = False, without: str | Path | None = None) -> Folder | None:
    """The files under a folder or URL, but for those under `without`; None if there is nothing.

    Raises:
        UserError: for a URL that cannot be reached.
    """
    if is_url(root):
        folder = _stored_folder(str(root))
        return folder if next(folder.names(), None) is not None else None
    if not Path(root).is_dir():
        return None
    base = Path(root).resolve()
    found = walk(base, follow_links=follow_links)
    if without is not None and (inner := Path(without).resolve()).is_relative_to(base):
        prefix = f"{inner.relative_to(base).as_posix()}/"
        found = (each for each in found if not each.name.startswith(prefix))
    return Folder(str(base), found, os.path.abspath(root))


def _stored_folder(url: str) -> Folder:
    """Raises UserError if it cannot be listed."""
    store, root = _store(url)
    try:
        paths = store.find(root)
    except Exception as error:  # each store has exceptions of its own
        raise UserError(f"{url} cannot be read: {error}") from error
    prefix = root.rstrip("/") + "/"
    names = (path.removeprefix(prefix) for path in paths if path != root)
    found = (Found(name, HIDDEN if any(map(is_litter, name.split("/"))) else "") for name in names)
    return Folder(store.unstrip_protocol(root.rstrip("/")), found)


def open_file(path: str) -> BinaryIO:
    """The bytes of a file on disk or at a URL; seekable.

    Raises:
        OSError: if it cannot be opened.
    """
    if not is_url(path):
        return open(path, "rb")
    store, inside = _store(path)
    return store.open(inside, "rb", block_size=BLOCK_BYTES)


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
