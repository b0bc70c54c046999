"""Files of a source: in a folder, or in any store that fsspec reaches (s3://BUCKET/PATH, gs://..., memory://...)."""

import io
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from heapq import merge
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from megadit.models.shared.addresses import check_no_secret
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import is_inner_name
from megadit.models.shared.outside import HIDDEN, Found, is_litter, walk
from megadit.train.dataset.places import is_url

CHUNK_BYTES = 1 << 16
"""Names that are sorted at once: sorting holds a key of each."""
BLOCK_BYTES = 1 << 22
"""Read from a store at a time."""


class Folder:
    """The files under one place, listed once. Their names are relative, with slashes."""

    def __init__(self, root: str, found: Iterable[Found], named: str = "") -> None:
        """`named`: how a user wrote `root`, with other links in it."""
        self.root = root
        self.roots = tuple(dict.fromkeys(filter(None, (root, named))))
        """Paths of the files begin with one of these, where a table has them whole."""
        not_used, files = {}, []
        for each in found:
            if each.reason:
                not_used[each.name] = each.reason
            else:
                files.append(each.name)
        self.not_used: dict[str, str] = dict(sorted(not_used.items()))
        """Name -> why it is not read."""
        files.sort()
        self._names = [name for name, _ in groupby(files)]

    def names(self) -> Sequence[str]:
        """Names of all files that may be read, sorted."""
        return self._names

    def place(self, name: str) -> int | None:
        """The place of the name among `names`; None if it is none of them."""
        place = bisect_left(self._names, name)
        return place if place < len(self._names) and self._names[place] == name else None

    def known(self, name: str) -> str | None:
        """The equal string in `names` (so that each name is in memory once); None if there is none."""
        place = self.place(name)
        return None if place is None else self._names[place]

    def __contains__(self, name: str) -> bool:
        return self.place(name) is not None

    def under(self, folder: str) -> Iterator[str]:
        """The names that begin with `folder`, which ends in a slash."""
        for place in range(bisect_left(self._names, folder), len(self._names)):
            if not self._names[place].startswith(folder):
                return
            yield self._names[place]

    def holds(self, name: str) -> bool:
        """Whether a name is inside of the folder, existing or not."""
        return is_inner_name(name)

    def path(self, name: str) -> str | None:
        """Path for `open_file`; None if there is no such file, or it may not be read."""
        name = str(PurePosixPath(name))
        return f"{self.root}/{name}" if name in self else None

    def called(self, stem: str) -> Iterator[str]:
        """The files of this `stem_of`, in whatever folder."""
        for place in range(bisect_left(self._by_stem, stem, key=stem_of), len(self._by_stem)):
            if stem_of(self._by_stem[place]) != stem:
                return
            yield self._by_stem[place]

    @cached_property
    def _by_stem(self) -> list[str]:
        parts = (
            sorted(self._names[start : start + CHUNK_BYTES], key=stem_of)
            for start in range(0, len(self._names), CHUNK_BYTES)
        )
        return list(merge(*parts, key=stem_of))


def stem_of(name: str) -> str:
    """The last part of a name without its suffix."""
    last = name[name.rfind("/") + 1 :]
    dot = last.rfind(".")
    return last[:dot] if 0 < dot < len(last) - 1 else last


def open_folder(root: str | Path, *, follow_links: bool = False, without: str | Path | None = None) -> Folder | None:
    """The files under a folder or URL, but for those under `without`; None if there is nothing.

    Raises:
        UserError: for a URL that cannot be reached.
    """
    if is_url(root):
        folder = _stored_folder(str(root))
        return folder if folder.names() else None
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

    check_no_secret(url, "the source")
    try:
        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url} cannot be reached: {error}; for s3:// install megadit[s3]") from None
