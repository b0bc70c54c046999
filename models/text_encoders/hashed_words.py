"""A text encoder without downloads: each word is a fixed random vector, plus a positional encoding.

Shapes: B batch, L text tokens (words), E text feature width.
"""

import dataclasses
import hashlib
import math
import os
import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megadit.models.diffusion.noise import Stream, normal
from megadit.models.shared.errors import UserError
from megadit.models.shared.words import split_words
from megadit.models.storage import components as parts
from megadit.models.text_encoders.base import TextFeatures

_MAX_PERIOD = 10_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HashedWordEncoder:
    """Words become Gaussian vectors seeded by a 128-bit hash: different words have different vectors, none is unknown.

    Feature l of a text is (word_l + order_scale * order_l) / sqrt(1 + order_scale^2), where word_l ~ N(0, I) is drawn
    from the BLAKE2b hash of the word and order_l is the sinusoidal encoding (arXiv 1706.03762, section 3.5) of l,
    scaled to unit mean square: features have about unit mean square.

    Raises:
        UserError: for sizes below 1 or an odd `dim`.
    """

    dim: int = 64
    max_length: int | None = None
    """Maximum number of words, to which texts are truncated; None: no limit."""
    order_scale: float = 0.5

    pooled_dim: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise UserError(f"dim={self.dim} must be even and at least 2")
        if self.max_length is not None and self.max_length < 1:
            raise UserError(f"max_length={self.max_length} must be at least 1, or None for no limit")

    def encode(self, texts: list[str]) -> TextFeatures:
        """Features on the CPU; letter case, punctuation and spacing are ignored."""
        words = [split_words(text) for text in texts]
        if self.max_length is not None and (longest := max([0, *map(len, words)])) > self.max_length:
            warnings.warn(f"a text of {longest} words is cut to its first {self.max_length}", stacklevel=2)
            words = [row[: self.max_length] for row in words]
        length_B = torch.tensor([len(row) for row in words], dtype=torch.int64)
        longest = max([1, *map(len, words)])
        is_word_BL = torch.arange(longest) < length_B[:, None]
        features_BLE = torch.zeros(len(texts), longest, self.dim)
        features_BLE[is_word_BL] = _word_vectors([word for row in words for word in row], self.dim)
        order_LE = self.order_scale * _order_encoding(longest, self.dim)
        features_BLE = (features_BLE + order_LE) * is_word_BL[..., None] / math.sqrt(1 + self.order_scale**2)
        return TextFeatures(features_BLE, length_B)

    def save(self, directory: str | os.PathLike) -> None:
        parts.write_component(directory, self._config(), {})

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "HashedWordEncoder":
        """The inverse of `save`.

        Raises:
            UserError: if config.json is missing or has other settings.
        """
        return cls(**parts.read_settings(directory, [field.name for field in dataclasses.fields(cls)]))

    def fingerprint(self) -> str:
        return parts.fingerprint(self._config(), {})

    def _config(self) -> dict:
        return {"type": "hashed_words", **dataclasses.asdict(self)}


def _word_vectors(words: list[str], dim: int) -> Tensor:
    """One row of standard normal numbers per word: half of its hash is the generator's key, the other half the
    position."""
    digests = [hashlib.blake2b(word.encode(), digest_size=16).digest() for word in words]
    integers = [[int.from_bytes(bytes_8, "little", signed=True) for bytes_8 in (d[:8], d[8:])] for d in digests]
    key_R, position_R = torch.tensor(integers, dtype=torch.int64).reshape(-1, 2).unbind(dim=1)
    return normal(key_R, position_R, dim, stream=Stream.WORD)


def _order_encoding(length: int, dim: int) -> Tensor:
    """sqrt(2) * (sin, cos) of l / 10000^(2e / dim) for each position l: [length, dim], unit mean square."""
    frequency = _MAX_PERIOD ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return (math.sqrt(2) * torch.cat([angle.sin(), angle.cos()], dim=1)).float()
