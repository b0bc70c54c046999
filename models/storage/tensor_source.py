"""Lazily read tensors, and safetensors files written one tensor at a time: memory holds one of them."""

import argparse
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megadit.models.shared.documents import check_archive, check_tensor_header
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path, write_json

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' dtype name -> torch dtype."""
MAX_SHARD_BYTES = 10 * 1000**3
"""Maximum size of a published file of weights, as diffusers writes them."""
LONGEST_NAME = 500
"""Maximum characters of a tensor's name."""
OPEN_FILES = 2
"""Maximum number of shards that are mapped into memory at once."""


def renamed_by(rules: Iterable[tuple[str, Any]], name: str) -> str:
    """Rename a tensor: applies each (pattern, replacement) with `re.sub`, in order."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


@dataclass(frozen=True, slots=True)
class Stored:
    """Shape and dtype of a tensor that has not been read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Named tensors, and how to read one.

    Raises:
        UserError: for a name that no network has, which would flood, or command, a terminal or a log.
    """

    label: str
    """Name of the source, for messages."""
    stored: Mapping[str, Stored]
    read: Callable[[str], Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The metadata in a file's header."""

    def __post_init__(self) -> None:
        for name in self.stored:
            if len(name) > LONGEST_NAME or not name.isprintable():
                raise UserError(
                    f"{self.label} has a tensor named {name[:60]!a}, of {len(name):,} characters, which no network has"
                )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.stored.items()}

    def with_others(self, others: Mapping[str, Tensor]) -> "TensorSource":
        """These tensors and `others`."""
        more = from_state_dict(others)
        stored = {**self.stored, **more.stored}
        return TensorSource(self.label, stored, lambda name: (more if name in others else self).read(name))

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors, in memory."""
        return {name: self.read(name) for name in self.stored}


def load_pickled(file: Path | IO[bytes], where: str = "") -> Any:
    """Load a file of `torch.save` with tensors, numbers and texts, in lists and dictionaries, on the CPU.

    Tensors of a file (not of bytes) are memory-mapped where torch can. `where` names it in messages.

    Raises:
        UserError: if it cannot be read, contains other objects (no code is run), or would decompress to more than its
            size.
    """
    where = where or str(file)
    try:
        if not isinstance(file, Path):
            check_archive(file, where)
            return torch.load(file, map_location="cpu", weights_only=True)
        check_archive_file(file)
        with torch.serialization.safe_globals([argparse.Namespace]):  # plain command options
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except UserError:
        raise
    except pickle.UnpicklingError as error:  # torch's message advises to allow code
        raise UserError(f"{where} cannot be read: no torch.save file, or it holds more than tensors") from error
    except Exception as error:  # torch raises many types for damaged files
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"{where} cannot be read: {reason}") from error


def check_archive_file(path: Path) -> None:
    """See `check_archive`."""
    with path.open("rb") as file:
        check_archive(file, str(path))


def _check_header(path: Path) -> None:
    """Raises UserError for a safetensors file that is missing, or whose header is implausibly long."""
    try:
        with open(path, "rb") as file:
            check_tensor_header(file.read(8), str(path))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None


def from_state_dict(state_dict: Mapping[str, Tensor], label: str = "the state dict") -> TensorSource:
    stored = {name: Stored(tuple(tensor.shape), tensor.dtype) for name, tensor in state_dict.items()}
    return TensorSource(label, stored, lambda name: state_dict[name].detach())


def open_safetensors(*paths: str | os.PathLike) -> TensorSource:
    """The tensors of one safetensors file, or of the shards of one checkpoint.

    Raises:
        UserError: if a file is missing or damaged, or has an unknown dtype.
    """

    @lru_cache(maxsize=OPEN_FILES)
    def opened(path: str):
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is not a readable safetensors file: {error}") from None

    where, stored, metadata = {}, {}, {}
    for path in map(str, paths):
        _check_header(Path(path))
        file = opened(path)
        metadata |= file.metadata() or {}
        for name in file.keys():
            part = file.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise UserError(f"{path}: the tensor {name:.60} has dtype {part.get_dtype()}, which is not supported")
            if name in where:
                raise UserError(
                    f"both {where[name]} and {path} hold the tensor {name:.{LONGEST_NAME}}; keep one of them"
                )
            where[name], stored[name] = path, Stored(tuple(part.get_shape()), DTYPES[part.get_dtype()])
    label = str(paths[0]) if len(paths) == 1 else f"{Path(paths[0]).parent} ({len(paths)} files)"
    return TensorSource(label, stored, lambda name: opened(where[name]).get_tensor(name), metadata)


def check_numbers(source: TensorSource, names: Iterable[str]) -> None:
    """Raises UserError for one of these tensors that holds integers, or numbers that are not finite; reads one at a
    time."""
    names = list(names)
    check_floating(source, names)
    for name in names:
        if not is_finite(source.read(name)):
            raise UserError(f"{source.label}: {name} has numbers that are not finite, or is damaged")


def check_floating(source: TensorSource, names: Iterable[str]) -> None:
    """Raises UserError for one of these tensors that holds no floating-point numbers."""
    for name in names:
        if not (dtype := source.stored[name].dtype).is_floating_point:
            raise UserError(f"{source.label}: {name} holds {dtype}: give the original weights")


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a floating-point tensor of any shape are finite; torch does not tell those of 8 bits."""
    return bool((tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all())


def write_safetensors(
    path: str | os.PathLike,
    source: TensorSource,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes all tensors, optionally converted to `dtype`, reading one at a time; whole or not at all.

    `metadata` goes into the file's header.

    Raises:
        UserError: for numbers that are not finite, or do not fit `dtype`.
    """
    names = {number: name for name, number in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in source.stored.items():
        stored_dtype = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
        size = replace(tensor, dtype=stored_dtype).num_bytes
        header[name] = {
            "dtype": names[stored_dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in source.stored:
            entry, tensor = header[name], source.read(name)
            assert list(tensor.shape) == entry["shape"], f"{name} changed its shape while it was written"
            data = tensor.detach().to("cpu", DTYPES[entry["dtype"]]).contiguous().flatten()
            if data.is_floating_point() and not is_finite(data):
                raise UserError(f"{source.label}: {name} has numbers that {entry['dtype']} cannot hold, or is damaged")
            file.write(data.view(torch.uint8).numpy().data)


def write_shards(folder: Path, stem: str, source: TensorSource, max_bytes: int | None = None) -> None:
    """Writes all tensors to `stem`.safetensors or, if they exceed `max_bytes` (None: `MAX_SHARD_BYTES`), to shards with
    the index that diffusers and transformers read; a tensor is never divided."""
    most = MAX_SHARD_BYTES if max_bytes is None else max_bytes
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in source.stored.items():
        if shards[-1] and filled + tensor.num_bytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.num_bytes
    if len(shards) == 1:
        write_safetensors(folder / f"{stem}.safetensors", source)
        return
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, replace(source, stored={name: source.stored[name] for name in names}))
        weight_map |= dict.fromkeys(names, file)
    total = sum(tensor.num_bytes for tensor in source.stored.values())
    write_json(folder / f"{stem}.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
