"""Files in untrusted folders: every command that reads such a folder lists files by this module.

A link could name any file of the reader's: links out of the folder are left out unless `--follow_links` is given.
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
    "@eadir @recycle @tmp #recycle #snapshot __macosx $recycle.bin lost+found thumbs.db ehthumbs.db desktop.ini".split()
    + ["system volume information"]
)
"""Lower-case names of system folders and files: thumbnails, trash."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file, or another directory entry."""

    name: str
    """Relative path with slashes."""
    reason: str = ""
    """Reason for not reading it; empty for a regular file in the folder, or an allowed link to one."""


def walk(root: str | os.PathLike, *, follow_links: bool = False) -> Iterator[Found]:
    """All entries under `root` except folders, in no order.

    Hidden ones are included, with that reason. A linked folder is entered only with `follow_links`, and once.
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


def files_under(root: str | os.PathLike) -> list[Path]:
    """The readable files of `walk`, sorted by name."""
    names = sorted(found.name for found in walk(root) if not found.reason)
    return [Path(root, name) for name in names]


def is_litter(name: str) -> bool:
    """Whether a file or folder of this name is hidden, or belongs to the system."""
    return name.startswith(".") or name.lower() in LITTER


def leads_out(path: str | os.PathLike, root: str | os.PathLike) -> bool:
    """Whether links lead the path out of the folder, and out of the hub cache that contains it."""
    real, base = os.path.realpath(path), os.path.realpath(root)
    snapshots = (place.parent.parent for place in (Path(base), *Path(base).parents) if place.parent.name == "snapshots")
    return not any(_is_under(real, place) for place in (base, *(f"{each}/blobs" for each in snapshots)))


def check_own(root: str | os.PathLike) -> None:
    """Raises UserError for links out of a folder and special files: copying would copy a foreign file, or wait for
    ever."""
    for found in walk(root):
        path = Path(root, found.name)
        if leads_out(path, root) or not path.is_file():
            raise UserError(f"{path} is no file of {root} but leads elsewhere, or nowhere: put a file in its place")


def _is_under(real: str, base: str) -> bool:
    return real == base or real.startswith(base.rstrip("/") + "/")


def _kind(entry: os.DirEntry, base: str, entered: set[str], why: str, follow_links: bool) -> tuple[bool, str]:
    """Whether to enter an entry, and otherwise the reason for not reading it."""
    if not entry.is_symlink():
        if entry.is_dir():
            is_again = follow_links and os.path.realpath(entry.path) in entered  # by a link to a parent
            return (False, why or READ_ELSEWHERE) if is_again else (True, why)
        return False, why or ("" if entry.is_file() else "not a file")
    try:
        mode, real = entry.stat().st_mode, os.path.realpath(entry.path)
    except OSError:
        return False, why or "link to nothing"
    if not _is_under(real, base) and not follow_links:
        return False, why or LEADS_OUT
    if S_ISDIR(mode):
        # entries inside the folder are listed at their own path
        is_new = follow_links and real not in entered and not _is_under(real, base)
        entered.add(real)
        return (True, why) if is_new else (False, why or READ_ELSEWHERE)
    return False, why or ("" if S_ISREG(mode) else "not a file")


_MARKS = ("megadit.json", "model_index.json", "config.json", ".metadata")
"""Files that say what a folder is: our components, published models, and torch's distributed checkpoints."""
_OF_DEEPSPEED, _LATEST = "mp_rank_00_model_states.pt", "latest"
"""DeepSpeed's file of a network, in a folder for each step, and the file that names the last of these folders."""
_SOURCES = {
    "give one of its files of weights by itself": (".safetensors", ".pt", ".pth", ".ckpt", ".bin"),
    "megadit prepare webdataset makes a data set of its tar files": (".tar",),
    "megadit prepare videos makes a data set of its videos": (".mp4", ".mov", ".mkv", ".webm", ".avi"),
    "megadit prepare images makes a data set of its images": (".jpg", ".jpeg", ".png", ".webp"),
}
"""Use of files -> their suffixes."""


def next_step(path: Path) -> str:
    """Advice for a path that a command cannot read, by its content; begins with a semicolon, "": none."""
    if not path.is_dir():
        return ""
    entries = sorted(path.iterdir())
    if not entries:
        return "; it is empty: was its download interrupted?"
    inner = (each.parent for name in _MARKS for depth in ("*", "*/*") for each in path.glob(f"{depth}/{name}"))
    if (found := next(inner, None) or _file_of_deepspeed(path)) is not None:
        return f"; did you mean {found}?"
    there = {entry.suffix.lower() for entry in entries}
    return next((f"; {step}" for step, suffixes in _SOURCES.items() if there & {*suffixes}), "")


def _file_of_deepspeed(path: Path) -> Path | None:
    files, latest = sorted([*path.glob(_OF_DEEPSPEED), *path.glob(f"*/{_OF_DEEPSPEED}")]), path / _LATEST
    step = ""
    if latest.is_file() and not leads_out(latest, path):
        with latest.open(encoding="utf-8", errors="replace") as file:
            step = file.read(255).strip()
    return next((each for each in files if each.parent.name == step), files[-1] if files else None)
