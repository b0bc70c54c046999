"""Files under a folder that somebody else filled: every command that reads such a folder finds them here.

A link is a name that its author chose for a file of the reader's: those that lead out of the folder are left out unless
the reader asks for them (`--follow_links`).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from megadit.models.shared.errors import UserError

HIDDEN = "hidden"
LEADS_OUT = "link that leads out of the folder (--follow_links)"
READ_ELSEWHERE = "linked folder that is read elsewhere"
LITTER = frozenset(
    "@eadir __macosx #recycle $recycle.bin lost+found thumbs.db ehthumbs.db desktop.ini".split()
    + ["system volume information"]
)
"""Names, in lower case, that systems give to folders and files of their own: thumbnails, what was deleted."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file, or what stands in the place of one."""

    name: str
    """Relative, with slashes."""
    reason: str = ""
    """Why it is not read; empty: it is a regular file that lies in the folder, or is linked from it and may be read."""


def walk(root: str | os.PathLike, *, follow_links: bool = False) -> Iterator[Found]:
    """Everything under `root` that is no folder, in no order.

    What is hidden is found with that reason. A linked folder is entered with `follow_links` alone, and once.
    """
    base = os.path.realpath(root)
    entered = {base}
    waiting = [("", "")]
    while waiting:
        prefix, reason = waiting.pop()
        try:
            entries = list(os.scandir(os.path.join(base, prefix)))
        except OSError as error:
            yield Found(prefix.rstrip("/"), f"folder that cannot be read: {error.strerror}")
            continue
        for entry in entries:
            name, why = prefix + entry.name, reason or (HIDDEN if is_litter(entry.name) else "")
            is_folder, why = _kind(entry, base, entered, why, follow_links)
            if is_folder:
                waiting.append((f"{name}/", why))
            else:
                yield Found(name, why)


def files_under(root: str | os.PathLike, *, follow_links: bool = False) -> list[Path]:
    """The files of `walk` that may be read, sorted by their names."""
    names = sorted(found.name for found in walk(root, follow_links=follow_links) if not found.reason)
    return [Path(root, name) for name in names]


def is_litter(name: str) -> bool:
    """Whether a file or folder of this name is hidden, or a system's own."""
    return name.startswith(".") or name.lower() in LITTER


def leads_out(path: str | os.PathLike, root: str | os.PathLike) -> bool:
    """Whether links make the path a file outside the folder, and outside the cache of a hub of which it is a part."""
    real, base = os.path.realpath(path), os.path.realpath(root)
    snapshots = (place.parent.parent for place in (Path(base), *Path(base).parents) if place.parent.name == "snapshots")
    return not any(_is_under(real, place) for place in (base, *(f"{each}/blobs" for each in snapshots)))


def check_own(root: str | os.PathLike) -> None:
    """Raises UserError if what stands in a folder is none of its files: to copy it would copy a file of the reader's,
    or wait for ever."""
    for found in walk(root):
        path = Path(root, found.name)
        if leads_out(path, root) or not path.is_file():
            raise UserError(f"{path} is no file of {root} but leads elsewhere, or nowhere: put a file in its place")


def _is_under(real: str, base: str) -> bool:
    return real == base or real.startswith(base.rstrip("/") + "/")


def _kind(entry: os.DirEntry, base: str, entered: set[str], why: str, follow_links: bool) -> tuple[bool, str]:
    """Whether to enter an entry, and why it is not read otherwise."""
    if not entry.is_symlink():
        if entry.is_dir():
            is_again = follow_links and os.path.realpath(entry.path) in entered  # through a link to what holds it
            return (False, why or READ_ELSEWHERE) if is_again else (True, why)
        return False, why or ("" if entry.is_file() else "not a file")
    try:
        mode, real = entry.stat().st_mode, os.path.realpath(entry.path)
    except OSError:
        return False, why or "link to nothing"
    if not _is_under(real, base) and not follow_links:
        return False, why or LEADS_OUT
    if S_ISDIR(mode):
        # what lies in the folder is found where it lies
        is_new = follow_links and real not in entered and not _is_under(real, base)
        entered.add(real)
        return (True, why) if is_new else (False, why or READ_ELSEWHERE)
    return False, why or ("" if S_ISREG(mode) else "not a file")
