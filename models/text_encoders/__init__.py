"""Text encoders: from texts to features."""

import os

from megadit.models.shared.files import read_json
from megadit.models.storage.components import CONFIG_FILE, component_folder, component_type
from megadit.models.text_encoders import clip, t5
from megadit.models.text_encoders.base import NetworkTextEncoder, TextEncoder, TextFeatures
from megadit.models.text_encoders.class_labels import ClassLabels
from megadit.models.text_encoders.clip import CLIPTextEncoder
from megadit.models.text_encoders.hashed_words import HashedWordEncoder
from megadit.models.text_encoders.qwen_vl import QwenVLTextEncoder
from megadit.models.text_encoders.t5 import T5TextEncoder
from megadit.models.text_encoders.token_ids import TokenIds

__all__ = [
    "TEXT_ENCODERS",
    "CLIPTextEncoder",
    "ClassLabels",
    "HashedWordEncoder",
    "NetworkTextEncoder",
    "QwenVLTextEncoder",
    "T5TextEncoder",
    "TextEncoder",
    "TextFeatures",
    "TokenIds",
    "load_text_encoder",
]

TEXT_ENCODERS: dict[str, type[TextEncoder]] = {
    "class_labels": ClassLabels,
    "clip": CLIPTextEncoder,
    "hashed_words": HashedWordEncoder,
    "qwen_vl": QwenVLTextEncoder,
    "t5": T5TextEncoder,
    "token_ids": TokenIds,
}
PUBLISHED: dict[str, type[T5TextEncoder] | type[CLIPTextEncoder]] = {
    **dict.fromkeys(t5.NETWORKS, T5TextEncoder),
    **dict.fromkeys(clip.NETWORKS, CLIPTextEncoder),
}
"""Type of a `transformers` model -> the text encoder for it."""


def load_text_encoder(directory: str | os.PathLike) -> TextEncoder:
    """The text encoder in `directory`: a saved one, a published T5 or CLIP, or the one of a bundle.

    Raises:
        UserError: if there is none, or if this version does not know its type.
    """
    folder = component_folder(directory, "text_encoder")
    config = read_json(folder / CONFIG_FILE)
    if isinstance(config, dict) and "type" not in config and config.get("model_type") in PUBLISHED:
        return PUBLISHED[config["model_type"]](model=str(folder))
    return TEXT_ENCODERS[component_type(folder, "text encoder", TEXT_ENCODERS)].load(folder)
