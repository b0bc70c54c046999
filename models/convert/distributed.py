"""Megatron's distributed checkpoints (torch_dist) as tables of tensors, without Megatron.

torch describes the tensors in a pickle (`.metadata`), which is read by an unpickler that knows those descriptions and
nothing that could act; the tensors' own files hold nothing else.
"""

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megadit.models.support import UserError
from megadit.models.tensor_source import Stored, TensorSource

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_KNOWN = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_FILES, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    *(("torch", name) for name in _DTYPES),
}
"""All that a description is made of."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no description of tensors needs")


class _Reader(dcp.FileSystemReader):
    """torch's reader, with the careful unpickler."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        data = (Path(self.path) / ".metadata").read_bytes()
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("it describes no tensors")
        return metadata


def is_distributed(path: Path) -> bool:
    return (path / ".metadata").is_file() and any(path.glob("*.distcp"))


def open_distributed(path: Path) -> TensorSource:
    """The tensors of the model; optimizer state and everything that is no tensor are left aside.

    Layers that Megatron stacks along a first axis (`decoder.layers.mlp...`) are given one by one, under their index.

    Raises:
        UserError: if the description is damaged, or more than a description.
    """
    try:
        reader = _Reader(path)
        described = reader.read_metadata().state_dict_metadata
    except Exception as error:  # whatever a damaged or hostile file provokes in the unpickler
        raise UserError(f"{path / '.metadata'} is not read: {error}") from error
    tensors = {
        key: Stored(tuple(entry.size), entry.properties.dtype)
        for key, entry in described.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith("optimizer.")
    }
    stored, origin = {}, {}
    for key, tensor in tensors.items():
        for name, index in _unstacked(key, tensor.shape):
            shape = tensor.shape if index is None else tensor.shape[1:]
            stored[name], origin[name] = Stored(shape, tensor.dtype), (key, index)

    def read(name: str) -> Tensor:
        key, index = origin[name]
        whole = torch.empty(tensors[key].shape, dtype=tensors[key].dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load({key: whole}, storage_reader=_Reader(path), no_dist=True)
        return whole if index is None else whole[index].clone()

    return TensorSource(str(path), stored, read)


def _unstacked(key: str, shape: tuple[int, ...]) -> list[tuple[str, int | None]]:
    """(name, place along the first axis) of each tensor that is stored under this key."""
    head, mark, tail = key.partition("decoder.layers.")
    if not mark or tail.split(".")[0].isdecimal():
        return [(key, None)]
    return [(f"{head}{mark}{index}.{tail}", index) for index in range(shape[0])]
