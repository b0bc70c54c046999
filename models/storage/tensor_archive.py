"""TorchScript files (`.jit`) read as archives of tensors: nothing in them is executed.

A `.jit` is a zip that holds programs (`code/`), raw storages (`data/0`, `data/1`, ...) and a pickle (`data.pkl`) that
describes modules. The unpickler here only knows modules, tensors and plain lists, none of which can run code.
"""

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadit.models.shared.documents import check_archive, check_pickle
from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_source import Stored, TensorSource

LARGEST_PICKLE = 64 * 2**20
"""Maximum bytes of the description; that of a network of a thousand tensors takes less than a megabyte."""

_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: torch.dtype
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class _TensorRecord:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Module:
    """A module of the archive: its attributes, without its program."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def _rebuild_tensor(storage: _Storage, offset: int, shape: tuple, stride: tuple, *_: Any) -> _TensorRecord:
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    return _TensorRecord(storage, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


def _first(value: Any, *_: Any) -> Any:
    return value


_ALLOWED = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch.jit._pickle", "build_intlist"): _first,
    ("torch.jit._pickle", "build_tensorlist"): _first,
    ("torch.jit._pickle", "build_doublelist"): _first,
    ("torch.jit._pickle", "build_boollist"): _first,
    ("torch.jit._pickle", "restore_type_tag"): _first,
}


class _Unpickler(pickle.Unpickler):
    """Knows the names above, and rejects any other."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("__torch__"):
            return _Module
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no archive of tensors needs")

    def persistent_load(self, identifier: Any) -> _Storage:
        kind, dtype, key, _, count = identifier
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"it holds a {kind!r}")
        return _Storage(dtype, str(key), int(count))


def read_archive(path: str | Path) -> TensorSource:
    """The tensors of a `.jit`, under their module names.

    Raises:
        UserError: if the file is missing, damaged, or contains anything but tensors.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            check_archive(file, str(path))
        archive = zipfile.ZipFile(path)
        pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > LARGEST_PICKLE:
            raise UserError(f"{path} is not a TorchScript archive: it has no data.pkl of a usual size")
        root = pickles[0].filename.removesuffix("data.pkl")
        content = archive.read(pickles[0])
        check_pickle(content, f"{path}: data.pkl")
        records = dict(_tensors(_Unpickler(io.BytesIO(content)).load()))
        _check_storages(archive, root, records)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except UserError:
        raise
    except Exception as error:  # any error of the zip reader or unpickler
        raise UserError(f"{path} cannot be read: {error}") from error

    def read(name: str) -> Tensor:
        record = records[name]
        data = archive.read(f"{root}data/{record.storage.key}")
        flat = torch.frombuffer(bytearray(data), dtype=record.storage.dtype)
        try:
            return flat.as_strided(record.shape, record.stride, record.offset).clone()
        except RuntimeError as error:
            raise UserError(f"{path}: the tensor {name} reaches beyond its storage") from error

    stored = {name: Stored(record.shape, record.storage.dtype) for name, record in records.items()}
    return TensorSource(str(path), stored, read)


def _tensors(module: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, _TensorRecord]]:
    if depth > 64:
        raise UserError("the archive's modules are nested more than 64 deep")
    for name, value in vars(module).items() if isinstance(module, _Module) else ():
        if isinstance(value, _TensorRecord):
            yield prefix + name, value
        elif isinstance(value, _Module):
            yield from _tensors(value, f"{prefix}{name}.", depth + 1)


def _check_storages(archive: zipfile.ZipFile, root: str, records: dict[str, _TensorRecord]) -> None:
    sizes = {info.filename: info.file_size for info in archive.infolist()}
    for name, record in records.items():
        storage = record.storage
        expected = storage.count * storage.dtype.itemsize
        found = sizes.get(f"{root}data/{storage.key}")
        if found != expected:
            raise UserError(f"the tensor {name} needs {expected} bytes, and the archive has {found or 0}: it was cut")
        if math.prod(record.shape) > storage.count:
            raise UserError(f"the tensor {name} of shape {list(record.shape)} is larger than its {expected} bytes")
