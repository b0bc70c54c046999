"""Conversion of Energon's reader states to plain JSON values and back, so that checkpoints hold no pickled objects.

A container that JSON lacks becomes a dictionary with one tag: `{"tuple": [...]}`, `{"bytes": base64}`,
`{"tensor": {...}}`, `{"array": {...}}`, `{"flex": {...}}` or `{"class": name, "fields": {...}}`.
"""

import base64
import dataclasses
from typing import Any

import numpy as np
import torch
from megatron.energon.flavors.base_dataset import FlexState
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState

from megadit.models.shared.errors import UserError

STATE_CLASSES = {
    state_class.__name__: state_class
    for state_class in (
        SavableDataLoaderState,
        SavableDatasetCheckpoint,
        SavableDatasetState,
        SliceState,
        SystemRngState,
    )
}


def to_plain(value: Any) -> Any:
    """Convert a value of an Energon state to JSON values."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case FlexState():
            return {"flex": {key: to_plain(item) for key, item in value.items()}}
        case list():
            return [to_plain(item) for item in value]
        case tuple():
            return {"tuple": [to_plain(item) for item in value]}
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case torch.Tensor():
            return {"tensor": _array_to_plain(value.numpy())}
        case np.ndarray():
            return {"array": _array_to_plain(value)}
    name = type(value).__name__
    if STATE_CLASSES.get(name) is not type(value):
        raise TypeError(f"Energon's state holds a {type(value)}, which this version cannot save")
    fields = {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"class": name, "fields": fields}


def from_plain(plain: Any) -> Any:
    """The inverse of `to_plain`.

    Raises:
        UserError: for anything that `to_plain` does not write.
    """
    match plain:
        case None | bool() | int() | float() | str():
            return plain
        case list():
            return [from_plain(item) for item in plain]
        case {"flex": items}:
            return FlexState((key, from_plain(item)) for key, item in items.items())
        case {"tuple": items}:
            return tuple(from_plain(item) for item in items)
        case {"bytes": text}:
            return base64.b64decode(text)
        case {"tensor": array}:
            return torch.from_numpy(_array_from_plain(array))
        case {"array": array}:
            return _array_from_plain(array)
        case {"class": name, "fields": fields} if name in STATE_CLASSES:
            return STATE_CLASSES[name](**{key: from_plain(item) for key, item in fields.items()})
    raise UserError("the saved state of the data reader is damaged, or from another version of megadit or Energon")


def _array_to_plain(array: np.ndarray) -> dict[str, Any]:
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "data": base64.b64encode(array.tobytes()).decode(),
    }


def _array_from_plain(plain: dict[str, Any]) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(plain["data"]), dtype=plain["dtype"])
    return flat.reshape(plain["shape"]).copy()
