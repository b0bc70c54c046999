"""Videos to latents and back."""

import os

from megadit.models.parts import part_type
from megadit.models.tokenizers.autoencoder_kl import ImageAutoencoder
from megadit.models.tokenizers.base import VideoTokenizer
from megadit.models.tokenizers.cosmos import CosmosTokenizer
from megadit.models.tokenizers.haar import HaarTokenizer

__all__ = [
    "TOKENIZERS",
    "CosmosTokenizer",
    "HaarTokenizer",
    "ImageAutoencoder",
    "VideoTokenizer",
    "load_tokenizer",
]

TOKENIZERS: dict[str, type[VideoTokenizer]] = {
    "autoencoder_kl": ImageAutoencoder,
    "cosmos": CosmosTokenizer,
    "haar": HaarTokenizer,
}


def load_tokenizer(directory: str | os.PathLike) -> VideoTokenizer:
    """The tokenizer saved in `directory`.

    Raises:
        UserError: if there is none, or if this version does not know its type.
    """
    return TOKENIZERS[part_type(directory, "tokenizer", TOKENIZERS)].load(directory)
