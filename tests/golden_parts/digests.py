"""Digests of tensors, arrays and files."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def digest_tensor(tensor: Tensor) -> str:
    """Of its bits, shape and dtype."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return digest(head + flat.view(torch.uint8).numpy().tobytes())


def digest_tensors(tensors: Mapping[str, Tensor], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, tensor in sorted(tensors.items()):
        yield f"{prefix}{name}", digest_tensor(tensor)


def digest_file(path: Path) -> str:
    return digest(path.read_bytes())


def exact(value: Any, prefix: str) -> Iterator[tuple[str, str | int]]:
    """The numbers in a tree of JSON values, by their path."""
    if isinstance(value, dict):
        for key, member in value.items():
            yield from exact(member, f"{prefix}/{key}")
    elif isinstance(value, float):
        yield prefix, value.hex() if math.isfinite(value) else str(value)
    elif value is not None:
        yield prefix, value
