"""Video tokenizers: from videos to latents and back."""

import os
from collections.abc import Callable
from pathlib import Path

from megadit.models.storage.components import component_folder, component_type
from megadit.models.tokenizers.autoencoder import Autoencoder
from megadit.models.tokenizers.base import VideoTokenizer
from megadit.models.tokenizers.haar import HaarTokenizer
from megadit.models.tokenizers.kinds import KINDS
from megadit.models.tokenizers.published import holds_tokenizer, published_tokenizer

__all__ = [
    "Autoencoder",
    "HaarTokenizer",
    "VideoTokenizer",
    "holds_tokenizer",
    "load_tokenizer",
    "published_tokenizer",
]

_LOADERS: dict[str, Callable[[str | os.PathLike], VideoTokenizer]] = {
    **dict.fromkeys(KINDS, Autoencoder.load),
    "haar": HaarTokenizer.load,
}
"""Type of a saved tokenizer -> its class."""


def load_tokenizer(directory: str | os.PathLike) -> VideoTokenizer:
    """The tokenizer in `directory`: a saved one, a published one, or the one of a bundle or pipeline.

    Raises:
        UserError: if there is none, or if this version does not know its type.
    """
    if any(map(holds_tokenizer, (Path(directory), Path(directory) / "vae"))):
        return published_tokenizer(directory)
    folder = component_folder(directory, "tokenizer")
    return _LOADERS[component_type(folder, "tokenizer", _LOADERS)](folder)
