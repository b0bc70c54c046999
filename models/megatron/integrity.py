"""Checks that a checkpoint is unchanged, before anything in it is read.

Every file is listed with its SHA-256 in `SHA256SUMS`, in the format of `sha256sum` (`sha256sum -c SHA256SUMS` checks
it, too). A file that was cut short, changed, deleted, added or exchanged does not fit that list; nor does a list that
was changed itself.

Checksums do not authenticate the writer. torch describes the tensors of a checkpoint in a pickle,
`tensors/.metadata`, which could run code when it is loaded; `read_description` builds only the few classes that such
a description needs, and rejects everything else.
"""

import hashlib
import io
import pickle
import re
from collections.abc import Iterable
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from megadit.models.shared.documents import check_pickle
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_limited

SUMS = "SHA256SUMS"
DESCRIPTION = ".metadata"
_MOST_BYTES = 1 << 28
"""Maximum bytes of either file: they have some hundred bytes for each shard of each tensor."""
_LINE = re.compile(r"([0-9a-f]{64})  (.+)\n")

_CLASSES = {
    *(("torch", name) for name in ("Size", "float32", "float16", "bfloat16", "float64")),
    *(("torch", name) for name in ("int64", "int32", "int16", "int8", "uint8", "bool")),
    ("torch.serialization", "_get_layout"),  # a look-up in a table
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),  # where it was saved
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
            *("ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
    *(
        ("torch.distributed.checkpoint.planner", name)
        for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
}
"""(module, name) of the classes that checkpoint metadata may contain; all of them only hold values."""


class DamagedCheckpointError(UserError):
    """A checkpoint that differs from what was written; the message names the file."""


def file_names(directory: Path) -> list[str]:
    """The files in a directory and below it, except the list of checksums, as relative paths."""
    found = [path for path in directory.rglob("*") if not path.is_dir()]
    return sorted(name for path in found if (name := path.relative_to(directory).as_posix()) != SUMS)


def checksums(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each file, in hexadecimal."""
    sums = {}
    for name in names:
        with (directory / name).open("rb") as file:
            sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def write_sums(directory: Path, sums: dict[str, str]) -> None:
    """Writes the list of checksums, the last file of a checkpoint."""
    (directory / SUMS).write_text(
        "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())), encoding="utf-8"
    )


def read_sums(directory: Path) -> dict[str, str]:
    """The list of checksums.

    Raises:
        DamagedCheckpointError: if it is missing or cannot be read.
    """
    if not (directory / SUMS).exists():
        raise DamagedCheckpointError(f"{directory} is damaged: {SUMS} is missing")
    try:
        text = read_limited(directory / SUMS, _MOST_BYTES).decode()
    except (UserError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(f"{directory} is damaged: {SUMS} cannot be read ({error})") from None
    lines = _LINE.findall(text)
    if "".join(f"{digest}  {name}\n" for digest, name in lines) != text:
        raise DamagedCheckpointError(f"{directory} is damaged: {SUMS} is not a list of checksums")
    return {name: digest for digest, name in lines}


def check(directory: Path, found: dict[str, str] | None = None) -> None:
    """Compares every file of a checkpoint with its list of checksums.

    Args:
        directory: the checkpoint.
        found: its checksums, if already known (several ranks compute them faster).

    Raises:
            DamagedCheckpointError: naming the first file that is missing, unknown or changed; or if the description of
            the
                tensors contains anything else.
    """
    listed = read_sums(directory)
    names = file_names(directory)
    for name in sorted({*listed, *names}):
        if name not in names:
            raise DamagedCheckpointError(f"{directory} is damaged: {name} is missing")
        if name not in listed:
            raise DamagedCheckpointError(f"{directory} is damaged: {name} is not in {SUMS}")
    if found is None:
        found = checksums(directory, names)
    for name in names:
        if found.get(name) != listed[name]:
            raise DamagedCheckpointError(
                f"{directory} is damaged: {name} is not what was written (its SHA-256 differs)"
            )
    for name in names:
        if Path(name).name == DESCRIPTION:
            read_description((directory / name).parent)


def read_description(directory: Path, *, only_tensors: bool = True) -> Metadata:
    """The description of the tensors in a distributed checkpoint of torch, read without running code from it.

    Without `only_tensors`, entries of other objects (which torch would unpickle) are described too: do not read them.

    Raises:
        DamagedCheckpointError: if it contains anything but descriptions of tensors in files of this directory.
    """
    path = directory / DESCRIPTION
    try:
        content = read_limited(path, _MOST_BYTES)
        check_pickle(content, DESCRIPTION)
        description = _Unpickler(io.BytesIO(content)).load()
    except (UserError, pickle.UnpicklingError) as error:
        raise DamagedCheckpointError(f"{path} is damaged or hostile: {error}") from None
    except Exception as error:  # a broken pickle can raise any error
        raise DamagedCheckpointError(f"{path} is damaged: {type(error).__name__} {error}") from None
    if not isinstance(description, Metadata) or not isinstance(description.storage_data, dict):
        raise DamagedCheckpointError(f"{path} is damaged or hostile: it does not describe a checkpoint")
    for name, entry in description.state_dict_metadata.items():
        if only_tensors and not isinstance(entry, TensorStorageMetadata):  # torch would unpickle its bytes
            raise DamagedCheckpointError(f"{path} is damaged or hostile: {name!r} is not a tensor")
    for place in description.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise DamagedCheckpointError(f"{path} is damaged or hostile: it names the file {place.relative_path!r}")
    return description


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of tensors needs")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an external object")


def _member(kind: Any, name: Any) -> Enum:
    """`getattr` as Python before 3.11.4 pickles members of enumerations; nothing else is allowed."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it names the attribute {name!r}, which no description of tensors needs")
    return kind[name]


class SafeReader(dcp.FileSystemReader):
    """torch's reader of distributed checkpoints, with the description read by `read_description`, once."""

    @cached_property
    def _description(self) -> Metadata:
        return read_description(Path(self.path))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        description = self._description
        description.storage_meta = description.storage_meta or StorageMeta()
        description.storage_meta.load_id = self.load_id
        return description
