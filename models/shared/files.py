"""Files that are written completely or not at all, checks of untrusted file names, and the manifest of a folder."""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from megadit.models.shared.cli.command import cleaning_up
from megadit.models.shared.documents import MAX_BYTES, check_size, parse_json, parse_yaml
from megadit.models.shared.errors import UserError, not_written
from megadit.models.shared.text_encoding import decoded

_OF_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of writes that fail for their disk, a quota or a limit."""
LONGEST_NAME, LONGEST_PATH = 255, 1024
MAX_MEDIA_BYTES = 1 << 36
"""Maximum bytes of an image, a video or an adapter that is used by its name."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Beginning of a URL, also after `Path`, which takes one slash of two away."""
RECORD_SUFFIX = ".json"
"""Suffix of a video's record, after the whole file name of the video."""
MANIFEST_FILE = "megadit.json"
"""The manifest of a bundle or an adapter: among others, size and checksum of each other file in its folder."""


def check_local(path: str | os.PathLike) -> None:
    """Raises UserError for a URL where something is written: its path would be a folder of this machine."""
    if _URL.match(str(path)):
        raise UserError(f"{path} is a URL: write to a folder of this machine, and copy it from there (megadit push)")


def _temporary_sibling(path: Path) -> Path:
    """A hidden, unused name in the same directory (for an atomic rename) with the same suffix (from which writers such
    as imageio choose the format)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")


def sha256_of(path: str | os.PathLike, max_bytes: int | None = None) -> str:
    """The checksum of a file; one with holes can have terabytes, which take hours: `max_bytes` is for those of others.

    Raises:
        UserError: if it cannot be read, or is longer.
    """
    try:
        if max_bytes is not None:
            check_size(os.stat(path).st_size, str(path), max_bytes)
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def inner_path(root: str | os.PathLike, name: str, *, follow_links: bool = False) -> Path:
    """`root / name`, for an untrusted name: from a bucket, an archive, a manifest or a table.

    With `follow_links`, links inside `root` may lead out of it, as in the caches of hubs.

    Raises:
        UserError: if the name leads out of `root`.
    """
    path = Path(root, name)
    if not is_inner_name(name) or not (follow_links or path.resolve().is_relative_to(Path(root).resolve())):
        raise UserError(f"{name!r} is not the name of a file in {root}: it leads elsewhere; do not trust its source")
    return path


def can_be_folder(path: str | os.PathLike) -> bool:
    """Whether neither the path nor any parent is a file."""
    return not any(place.is_file() for place in (Path(path), *Path(path).parents))


def is_inner_name(name: str) -> bool:
    """Whether a path with slashes is valid and stays inside its folder (links are not checked)."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and is_possible_name(name)


def is_possible_name(name: str) -> bool:
    """Whether a path with slashes is valid: names have at most 255 bytes."""
    parts = (part.encode("utf-8", "surrogatepass") for part in PurePosixPath(name).parts)
    return "\0" not in name and len(name) <= LONGEST_PATH and all(len(part) <= LONGEST_NAME for part in parts)


def _name(error: OSError, path: Path) -> None:
    """Adds the path to the error of a failed write, such as of a full disk, which lacks it."""
    if error.filename is None and error.errno in _OF_WRITES:
        error.filename = str(path)


@contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary name to write a file under; renames it to `path` on success, removes it on errors and signals.

    Raises:
        UserError: for a URL.
    """
    check_local(path)
    path = Path(path)
    temporary = _temporary_sibling(path)
    with cleaning_up():
        try:
            yield temporary
            os.replace(temporary, path)
        except OSError as error:
            _name(error, path)
            raise
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: str | os.PathLike) -> Iterator[Path]:
    """Yields an empty temporary directory that becomes `path` on success and is removed on any error or signal.

    A directory already at `path` is replaced once the new one is complete.

    Raises:
        UserError: for a URL, and if `path` exists and is not a directory.
    """
    check_local(path)
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; give the name of a directory")
    temporary, replaced = _temporary_sibling(path), _temporary_sibling(path)
    with cleaning_up():
        temporary.mkdir()
        try:
            yield temporary
            is_there = False
            while not is_there:
                with suppress(FileNotFoundError):
                    os.replace(path, replaced)
                is_there = _took_place(temporary, path)
                if not is_there:  # another process's has become `path` meanwhile: it is replaced, too
                    shutil.rmtree(replaced, ignore_errors=True)
        except BaseException as error:
            if isinstance(error, OSError):
                _name(error, path)
            if replaced.exists() and not path.exists():
                os.replace(replaced, path)
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(replaced, ignore_errors=True)


def _took_place(temporary: Path, path: Path) -> bool:
    """Rename a directory; False if there is another one, with files."""
    try:
        os.replace(temporary, path)
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False


def remove_leftovers(path: Path) -> None:
    """Removes temporary directories that killed processes left at `path`; only for a process that owns `path`."""
    name = re.compile(rf"\.{re.escape(path.stem)}\.[0-9a-f]{{8}}{re.escape(path.suffix)}")
    for each in path.parent.iterdir() if path.parent.is_dir() else ():
        if name.fullmatch(each.name) and each.is_dir() and not each.is_symlink():
            shutil.rmtree(each, ignore_errors=True)


@contextmanager
def held_alone(path: str | os.PathLike) -> Iterator[None]:
    """Waits until no other process holds the lock file `path`, creates it, and holds it within the block.

    The caller should then check whether another process has already done the work. The lock ends with its process.

    Raises:
        UserError: if the file cannot be created.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise not_written(path, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_json(path: str | os.PathLike, obj: Any) -> None:
    """Writes `obj` as indented JSON, whole or not at all."""
    text = json.dumps(obj, indent=2, ensure_ascii=False) + "\n"
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def cache_folder() -> Path:
    """Folder of the user's caches of this package; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megadit"


def record_path(path: Path) -> Path:
    """Return the path of a video's record; a.mp4 and a.gif have separate ones."""
    return path.with_name(f"{path.name}{RECORD_SUFFIX}")


def differences(saved: dict[str, Any], asked: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value in `saved`, value in `asked`) of the differences of two nested objects; None: missing."""
    for name in sorted(saved.keys() | asked.keys()):
        old, new = saved.get(name), asked.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}", old, new


def read_json(path: str | os.PathLike, *, max_bytes: int = MAX_BYTES, is_finite: bool = True) -> Any:
    """The contents of a JSON file, within the limits of `parse_json`.

    Raises:
        UserError: if the file is missing, cannot be read, is not JSON or exceeds the limits.
    """
    return parse_json(read_limited(path, max_bytes), str(path), max_bytes=max_bytes, is_finite=is_finite)


def read_object(path: str | os.PathLike) -> dict[str, Any]:
    """The JSON object in a file; raises as `read_json`, and for any other value."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise UserError(f"{path} holds {type(values).__name__}, not a JSON object; get the file again")
    return values


def read_yaml(path: str | os.PathLike) -> Any:
    """The contents of a YAML file, within the limits of `parse_yaml`; raises as `read_json`."""
    return parse_yaml(read_limited(path), str(path))


def read_limited(path: str | os.PathLike, max_bytes: int = MAX_BYTES) -> bytes:
    """The contents of a file that anybody may have written: one with holes can be of any length.

    Raises:
        UserError: if it is missing, cannot be read or is longer.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(max_bytes + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    check_size(len(content), str(path), max_bytes)
    return content


def read_key(path: str | os.PathLike) -> str:
    """The key of a service, alone in its file.

    Raises:
        UserError: if it cannot be read, or holds something else.
    """
    try:
        key = decoded(read_limited(path)).strip()
    except (UserError, ValueError) as error:
        raise UserError(f"{path} cannot be read; `megadit serve keys add NAME > {path}` writes one") from error
    if not key.isascii() or not key.isprintable() or not key or " " in key:
        raise UserError(f"{path} holds no key: it must be the one line that `megadit serve keys add NAME` prints")
    return key


def read_end(path: str | os.PathLike, num_bytes: int = 1 << 20) -> bytes:
    """The last bytes of a file of lines; the first line may be cut."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
        return file.read(num_bytes)


# --- manifests ---------------------------------------------------------------------------------------------------


def is_bundle(path: str | os.PathLike) -> bool:
    """Whether `path` looks like a bundle of any version (other directories contain a megadit.json, too)."""
    return (Path(path) / MANIFEST_FILE).is_file() and (Path(path) / "transformer").is_dir()


def is_within_bundle(path: str | os.PathLike) -> bool:
    """Whether the path, or any parent, is a bundle's folder."""
    return any(map(is_bundle, (path, *Path(path).absolute().parents)))


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Writes megadit.json with the size and checksum of every other file in `directory`."""
    names = [name for name in _file_names(directory) if name != MANIFEST_FILE]
    files = {name: _describe_file(directory / name) for name in names}
    write_json(directory / MANIFEST_FILE, {**manifest, "files": files})


def check_files(path: Path, manifest: Mapping[str, Any], *, verify: bool = False) -> None:
    """Checks that every file in a folder's manifest exists in its full size, with `verify` also its checksum.

    Raises:
        UserError: with the name of the wrong file.
    """
    for name, expected in manifest["files"].items():
        _check_file(inner_path(path, name, follow_links=True), expected, verify=verify)


def check_replaceable(out: Path) -> None:
    """Raises UserError if `out` is a directory that holds something else than a bundle."""
    if out.is_dir() and any(out.iterdir()) and not is_bundle(out):
        raise UserError(f"{out} holds files that are not a bundle, and would be replaced; choose another directory")


def _file_names(directory: Path) -> list[str]:
    return sorted(file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file())


def _describe_file(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}


def _check_file(file: Path, expected: Mapping[str, Any], *, verify: bool) -> None:
    if not file.is_file():
        raise UserError(f"{file} is missing: it was copied incompletely")
    if file.stat().st_size != expected["bytes"]:
        raise UserError(f"{file} has {file.stat().st_size} bytes instead of {expected['bytes']}: it was cut or changed")
    if verify and sha256_of(file) != expected["sha256"]:
        raise UserError(f"{file} differs from its checksum in {MANIFEST_FILE}: it was damaged or changed")
