"""Lazy conversion of tensors from a published checkpoint to our names, and back."""

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megadit.models.configs.protocol import NetworkConfig
from megadit.models.convert.tensor_map import Entry
from megadit.models.shared.errors import UserError
from megadit.models.storage.components import check_shapes, network_shapes
from megadit.models.storage.tensor_source import Stored, TensorSource, check_floating


def to_ours(
    source: TensorSource, entries: Sequence[Entry], config: NetworkConfig, *, ignored: str = "$^"
) -> TensorSource:
    """Our tensors of the network, after a check that the source has exactly the tensors of the entries.

    Raises:
        UserError: listing missing, unexpected and misshapen tensors, and for integers; `ignored` is a pattern of
            ignored names.
    """
    ours = network_shapes(config)
    expected = {name: shape for entry in entries for name, shape in their_shapes(entry, ours[entry.name]).items()}
    found = {name: shape for name, shape in source.shapes.items() if name in expected or not re.search(ignored, name)}
    check_shapes(found, expected, f"the tensors of {source.label}")
    check_floating(source, expected)
    by_name = {entry.name: entry for entry in entries}

    def read(name: str) -> Tensor:
        entry = by_name[name]
        try:
            return entry.join([source.read(theirs).to(stored[name].dtype) for theirs in entry.theirs]).contiguous()
        except ValueError as error:
            raise UserError(f"{source.label} cannot be converted: {error}") from error

    stored = {
        entry.name: Stored(ours[entry.name], _common(source.stored[theirs].dtype for theirs in entry.theirs))
        for entry in entries
    }
    return TensorSource(source.label, stored, read)


def _common(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The narrowest dtype that holds the numbers of all of them; torch promotes none of 8 bits."""
    first, *others = dict.fromkeys(dtypes)
    for other in others:
        first, other = (torch.float16 if dtype.itemsize == 1 else dtype for dtype in (first, other))
        first = torch.promote_types(first, other)
    return first


def to_theirs(source: TensorSource, entries: Sequence[Entry]) -> TensorSource:
    """Published tensors, from ours."""
    stored, origin = {}, {}
    for entry in entries:
        whole = source.stored[entry.name]
        for place, (name, shape) in enumerate(their_shapes(entry, whole.shape).items()):
            stored[name], origin[name] = Stored(shape, whole.dtype), (entry, place)

    def read(name: str) -> Tensor:
        entry, place = origin[name]
        return entry.split(source.read(entry.name))[place].contiguous()

    return TensorSource(source.label, stored, read)


def their_shapes(entry: Entry, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the published tensors of one of our tensors, which has this shape."""
    parts = entry.split(torch.empty(shape, device="meta"))
    return {name: tuple(part.shape) for name, part in zip(entry.theirs, parts, strict=True)}
