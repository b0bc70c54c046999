"""Checkpoints as tables of tensors that are read one at a time, and our tensors as a lazy view of them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megadit.models.config import DiTConfig
from megadit.models.convert.tensor_map import Entry
from megadit.models.support import UserError
from megadit.models.weights import check_shapes, dit_shapes


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint says about a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The tensors of a checkpoint."""

    label: str
    """Names it in messages."""
    stored: Mapping[str, Stored]
    read: Callable[[str], Tensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.stored.items()}

    def without_prefix(self, prefix: str) -> "TensorSource":
        """The same tensors under shorter names; those of other names keep them."""
        names = {name.removeprefix(prefix): name for name in self.stored}
        stored = {short: self.stored[name] for short, name in names.items()}
        return TensorSource(self.label, stored, lambda short: self.read(names[short]))


def from_state_dict(state_dict: Mapping[str, Tensor], label: str = "the state dict") -> TensorSource:
    stored = {name: Stored(tuple(tensor.shape), tensor.dtype) for name, tensor in state_dict.items()}
    return TensorSource(label, stored, lambda name: state_dict[name])


class ConvertedTensors(Mapping[str, Tensor]):
    """Our tensors, each made when it is asked for and then forgotten: what is held at once is one of them."""

    def __init__(self, source: TensorSource, entries: Sequence[Entry]) -> None:
        self._source = source
        self._entries = {entry.name: entry for entry in entries}

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        try:
            return entry.join([self._source.read(theirs) for theirs in entry.theirs]).contiguous()
        except ValueError as error:
            raise UserError(f"{self._source.label} cannot be converted: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def converted(
    source: TensorSource, entries: Sequence[Entry], config: DiTConfig, *, ignored: str = "$^"
) -> ConvertedTensors:
    """Our tensors of `DiT(config)`, after a check that theirs are exactly those that the entries ask for.

    Raises:
        UserError: listing the missing, unexpected and misshapen tensors; `ignored` is a pattern of those left aside.
    """
    expected, ours = {}, dit_shapes(config)
    for entry in entries:
        parts = entry.split(torch.empty(ours[entry.name], device="meta"))
        expected |= {name: tuple(part.shape) for name, part in zip(entry.theirs, parts, strict=True)}
    found = {name: shape for name, shape in source.shapes.items() if name in expected or not re.search(ignored, name)}
    check_shapes(found, expected, f"the tensors of {source.label}")
    return ConvertedTensors(source, entries)


def split_tensors(state_dict: Mapping[str, Tensor], entries: Sequence[Entry]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of theirs, from ours."""
    for entry in entries:
        for name, part in zip(entry.theirs, entry.split(state_dict[entry.name]), strict=True):
            yield name, part.contiguous()
