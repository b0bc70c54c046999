"""megadit.json, the manifest of a bundle: size and checksum of each of its files. Nothing here imports torch."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import inner_path, sha256_of, write_json

MANIFEST_FILE = "megadit.json"


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
