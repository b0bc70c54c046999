"""Texts to features."""

import os

from megadit.models.parts import part_type
from megadit.models.text_encoders.base import TextEncoder, TextFeatures
from megadit.models.text_encoders.hashed_words import HashedWordEncoder

__all__ = ["TEXT_ENCODERS", "HashedWordEncoder", "TextEncoder", "TextFeatures", "load_text_encoder"]

TEXT_ENCODERS: dict[str, type[TextEncoder]] = {"hashed_words": HashedWordEncoder}


def load_text_encoder(directory: str | os.PathLike) -> TextEncoder:
    """The text encoder saved in `directory`.

    Raises:
        UserError: if there is none, or if this version does not know its type.
    """
    return TEXT_ENCODERS[part_type(directory, "text encoder", TEXT_ENCODERS)].load(directory)
