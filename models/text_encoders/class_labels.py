"""Class labels in place of texts: a prompt is the name or the number of a class.

Shapes: B batch, L = 1 text token, E = 2 digits of the class's index.
"""

import os
from dataclasses import dataclass
from typing import ClassVar

import torch

from megadit.models.networks.embeddings import class_digits
from megadit.models.shared.errors import UserError, did_you_mean
from megadit.models.storage import components as parts
from megadit.models.text_encoders.base import TextFeatures


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassLabels:
    """Maps texts to the classes of a class-conditional network; the empty text is the null class.

    Raises:
        UserError: if there is no class.
    """

    names: tuple[str, ...]
    """Names of each class, in order; several names of one class are separated by commas."""

    dim: ClassVar[int] = 2
    pooled_dim: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not self.names:
            raise UserError("class labels need at least one name")

    def encode(self, texts: list[str]) -> TextFeatures:
        """One token each: see `class_digits`.

        Raises:
            UserError: for a text that is neither the name nor the number of a class.
        """
        digits = [class_digits(self.index(text)) if text.strip() else (0.0, 0.0) for text in texts]
        length_B = torch.tensor([int(bool(text.strip())) for text in texts], dtype=torch.int64)
        return TextFeatures(torch.tensor(digits).reshape(len(texts), 1, 2), length_B)

    def index(self, text: str) -> int:
        """The index of the class that a text names."""
        text = text.strip().lower()
        if text.isdecimal():
            if int(text) < len(self.names):
                return int(text)
            raise UserError(f"class {text} does not exist: there are 0 to {len(self.names) - 1}")
        synonyms = {name.strip().lower(): i for i, names in enumerate(self.names) for name in names.split(",")}
        synonyms |= {names.strip().lower(): i for i, names in enumerate(self.names)}  # all names of a class together
        if text not in synonyms:
            hint = did_you_mean(text, synonyms, f"give one of its names, or 0 to {len(self.names) - 1}")
            raise UserError(f"{text!r} is not a class of this network{hint}")
        return synonyms[text]

    def save(self, directory: str | os.PathLike) -> None:
        parts.write_component(directory, self._config(), {})

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "ClassLabels":
        return cls(names=tuple(parts.read_settings(directory, ["names"])["names"]))

    def fingerprint(self) -> str:
        return parts.fingerprint(self._config(), {})

    def _config(self) -> dict:
        return {"type": "class_labels", "names": list(self.names)}
