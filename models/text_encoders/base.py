"""The protocols of text encoders, and text features, cached for each text.

Shapes: B batch, L text tokens, E text feature width, P width of the pooled feature.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadit.models.networks.conditioning import Conditioning

_CACHED = 1024


@dataclass(frozen=True, slots=True, eq=False)
class TextFeatures:
    """The features of a batch of texts."""

    features_BLE: Tensor
    """float32, zero beyond each length; L is at least 1."""
    length_B: Tensor
    """int64; 0 for an empty text, unless its encoder has features for it."""
    pooled_BP: Tensor | None = None
    """float32, pooled features; None if the encoder has none."""

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
    """Width P of the pooled feature; None: it has none."""

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
    """An int64 input of a text encoder's network, [B, L]; L may be fixed."""

    below: int
    """Number of different values (vocabulary size)."""
    places: tuple[int, ...] | None = None
    """The shape without the batch; None: as many tokens as the longest text has."""


def on_device(encoder: Any, device: torch.device) -> Any:
    """An encoder that computes on `device`, if it has its own weights; others compute where their input is."""
    return encoder.to(device) if hasattr(encoder, "to") else encoder


RunTokens = Callable[[Sequence[Tensor], tuple[int, ...]], Tensor]
"""(inputs of the network in order, shape of the output) -> the output, float32."""


@runtime_checkable
class PublishedTextEncoder(Protocol):
    """A text encoder with a published network, which is not copied into the bundle."""

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
    """A text encoder whose network can be exported and run by another runtime."""

    @property
    def token_inputs(self) -> tuple[TokenInput, ...]:
        """Inputs of its network."""

    def graph(self) -> nn.Module:
        """The network as a module with only tensor inputs, in float32 on the CPU."""

    def with_graph(self, run: RunTokens, device: torch.device) -> "TextEncoder":
        """The same encoder, with `run` (an exported graph) in place of its network."""

    def in_float32(self) -> "TextEncoder":
        """The same encoder with float32 weights, as it is exported."""


class TextFeaturesCache:
    """A text encoder with a cache of features, which may be freed between generations.

    Every text is encoded alone, so that its features do not depend on other texts of the batch.
    """

    def __init__(self, encoder: TextEncoder, reload: Callable[[], TextEncoder] | None = None) -> None:
        """Wrap an encoder; with `reload` it is freed after every `prepare`, and loaded again for new texts."""
        self._encoder: TextEncoder | None = encoder
        self._reload = reload
        self._seen: OrderedDict[str, TextFeatures] = OrderedDict()
        self._most = _CACHED

    def prepare(self, texts: Iterable[str]) -> None:
        """Encodes these texts before sampling needs the memory."""
        texts = list(dict.fromkeys(texts))
        self._most = max(_CACHED, len(texts))  # all of these are needed next
        for text in texts:
            self._features(text)
        if self._reload is not None:
            self._encoder = None

    def encode(self, texts: list[str]) -> TextFeatures:
        return TextFeatures.concatenate([self._features(text) for text in texts])

    def conditioning(self, texts: list[str], fps: float) -> Conditioning:
        """Return the conditioning of one video for each text; `fps` is 0 for images."""
        encoded = self.encode(texts)
        fps_B = torch.full((len(texts),), fps)
        return Conditioning(encoded.features_BLE, encoded.length_B, fps_B, pooled_BP=encoded.pooled_BP)

    def _features(self, text: str) -> TextFeatures:
        """Features of one text."""
        if text not in self._seen:
            if self._encoder is None:
                self._encoder = self._reload()
            self._seen[text] = self._encoder.encode([text])
        self._seen.move_to_end(text)
        features = self._seen[text]
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)
        return features
