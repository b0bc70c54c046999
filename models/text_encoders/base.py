"""The protocols of text encoders.

Shapes: B batch, L text tokens, E text feature width, P width of the one feature of a whole text.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class TextFeatures:
    """The features of a batch of texts."""

    features_BLE: Tensor
    """float32, zero beyond each length; L is at least 1."""
    length_B: Tensor
    """int64; 0 for an empty text, unless its encoder has features of that too."""
    pooled_BP: Tensor | None = None
    """float32, one feature of each whole text; None of encoders that have none."""

    @staticmethod
    def concatenate(parts: "Sequence[TextFeatures]") -> "TextFeatures":
        """One batch from several, whose texts may differ in length."""
        longest = max(part.features_BLE.shape[1] for part in parts)
        padded = [F.pad(part.features_BLE, (0, 0, 0, longest - part.features_BLE.shape[1])) for part in parts]
        pooled = [part.pooled_BP for part in parts]
        return TextFeatures(
            torch.cat(padded),
            torch.cat([part.length_B for part in parts]),
            None if pooled[0] is None else torch.cat(pooled),
        )


class TextEncoder(Protocol):
    """Turns texts into features."""

    dim: int
    """Width E of the features."""
    pooled_dim: int | None
    """Width P of the one feature of a whole text; None: it has none."""

    def encode(self, texts: list[str]) -> TextFeatures:
        """The features of these texts."""

    def save(self, directory: str | os.PathLike) -> None:
        """Writes config.json and, where there are tensors, model.safetensors."""

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "TextEncoder":
        """The inverse of `save`."""

    def fingerprint(self) -> str:
        """A short hash, equal where encoders give the same features."""


@dataclass(frozen=True, slots=True)
class TokenInput:
    """An input of a text encoder's network, int64: [B, L] or, with a fixed number of places, of that shape."""

    below: int
    """How many values there are."""
    places: tuple[int, ...] | None = None
    """The sides after the batch; None: as many tokens as the longest text has."""


def on_device(encoder: Any, device: torch.device) -> Any:
    """An encoder that computes on `device`, where it has weights of its own; others follow their input."""
    return encoder.to(device) if hasattr(encoder, "to") else encoder


RunTokens = Callable[[Sequence[Tensor], tuple[int, ...]], Tensor]
"""(inputs of the network in order, shape of the output) -> the output, float32."""


@runtime_checkable
class PublishedTextEncoder(Protocol):
    """A text encoder whose network is not in the bundle."""

    dtype: str
    """Dtype in which its weights are loaded."""

    @property
    def directories(self) -> tuple[os.PathLike, ...]:
        """Directories of its networks' files.

        Raises:
            UserError: if they are not on this machine; says what to download, and where to put it.
        """


@runtime_checkable
class NetworkTextEncoder(PublishedTextEncoder, Protocol):
    """One whose network can be exported and run by another runtime."""

    @property
    def token_inputs(self) -> tuple[TokenInput, ...]:
        """Inputs of its network."""

    def graph(self) -> nn.Module:
        """Its network as a module of tensors alone, in float32 on the CPU."""

    def with_graph(self, run: RunTokens, device: torch.device) -> "TextEncoder":
        """The same encoder, whose tokens go through the exported graph that `run` runs."""

    def in_float32(self) -> "TextEncoder":
        """The same encoder in the precision in which it is exported."""
