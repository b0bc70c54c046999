"""What the rest of the package asks of a text encoder.

Shapes: B batch, L text tokens, E text feature width.
"""

import os
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TextFeatures:
    """The features of a batch of texts."""

    features_BLE: Tensor
    """float32, zero beyond each length; L is at least 1."""
    length_B: Tensor
    """int64; 0 for an empty text."""


class TextEncoder(Protocol):
    """Turns texts into features."""

    dim: int
    """Width E of the features."""

    def encode(self, texts: list[str]) -> TextFeatures:
        """The features of these texts."""

    def save(self, directory: str | os.PathLike) -> None:
        """Writes config.json and, where there are tensors, model.safetensors."""

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "TextEncoder":
        """The inverse of `save`."""

    def fingerprint(self) -> str:
        """A short hash, equal where encoders give the same features."""
