"""Megatron's distributed checkpoints (torch_dist) as tables of tensors, without Megatron and without running code."""

import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from megadit.models.megatron.integrity import read_description
from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_source import Stored, TensorSource

_OF_OPTIMIZER = re.compile(r"(^|\.)optim(izer)?s?\.")
"""Pattern of an optimizer's states: Megatron's, and torchtitan's."""


class _Reader(dcp.FileSystemReader):
    """torch's reader with a restricted unpickler; only tensors are read."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        description = read_description(Path(self.path), only_tensors=False)
        description.storage_meta = description.storage_meta or StorageMeta()
        description.storage_meta.load_id = self.load_id
        return description


def is_distributed(path: Path) -> bool:
    return (path / ".metadata").is_file() and any(path.glob("*.distcp"))


def open_distributed(path: Path) -> TensorSource:
    """The tensors of the model; optimizer state and other objects are ignored.

    Layers that Megatron stacks along a first axis (`decoder.layers.mlp...`) are returned separately, under their index.

    Raises:
        UserError: if the metadata is damaged, or contains other objects.
    """
    described = read_description(path, only_tensors=False).state_dict_metadata
    tensors = {
        key: Stored(tuple(entry.size), entry.properties.dtype)
        for key, entry in described.items()
        if isinstance(entry, TensorStorageMetadata) and not _OF_OPTIMIZER.search(key)
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
            try:
                dcp.load({key: whole}, storage_reader=_Reader(path), no_dist=True)
            except (CheckpointException, Exception) as error:  # the first is none of the second
                raise UserError(f"{path} is damaged: {key} cannot be read") from error
        return whole if index is None else whole[index].clone()

    return TensorSource(str(path), stored, read)


def _unstacked(key: str, shape: tuple[int, ...]) -> list[tuple[str, int | None]]:
    """(name, index along the first axis) of each tensor that is stored under this key."""
    head, mark, tail = key.partition("decoder.layers.")
    if not mark or tail.split(".")[0].isdecimal():
        return [(key, None)]
    return [(f"{head}{mark}{index}.{tail}", index) for index in range(shape[0])]
