"""Encodings of a data set and their encoders.

A YAML file lists them:

    - {name: latent, modality: video, encoder: weights/tokenizer, precision: float16}
    - {name: text, modality: text, encoder: weights/t5, precision: float16}
    - {name: text_short, modality: text, encoder: hashed_words, precision: float32, padding: 16}

`encoder` is a folder with a config.json, or a built-in one: `haar` (fitted to the clips) or `pixels` (no encoding) for
videos; `hashed_words`, `labels` (captions are class names) or `tokens` (byte pair encoding of captions) for texts.
Training reads `latent` and `text`; others are stored in addition. `padding` is the length to which texts are padded
with zeros, or cut; without it texts keep their lengths.

Shapes: B clips, C channels, T/H/W frames, height, width, L text tokens, E text feature width.
"""

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from megadit.models.machine import one_thread
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.text_encoders import ClassLabels, HashedWordEncoder, TextEncoder, load_text_encoder
from megadit.models.text_encoders.base import on_device
from megadit.models.tokenizers import HaarTokenizer, VideoTokenizer, load_tokenizer

PRECISIONS = {"float16": torch.float16, "float32": torch.float32}
MODALITIES = ("video", "text")
HAAR, LABELS, TOKENS = "haar", "labels", "tokens"
"""Encoders that are fitted to the clips or captions, and saved in the folder of the preparation."""
USUAL_CHANNELS = (32, 48, 64, 96)
"""Numbers of channels of a fitted tokenizer for which the PSNR is reported for comparison."""
BUILT_IN: dict[str, Callable[[], VideoTokenizer | TextEncoder]] = {
    HAAR: HaarTokenizer,
    "pixels": partial(HaarTokenizer, temporal_compression=1, spatial_compression=1),
    "hashed_words": HashedWordEncoder,
}
"""Name -> built-in encoder (`haar`: not yet fitted)."""
LATENT, TEXT = "latent", "text"
"""Names of the two encodings that training reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """One line of the file."""

    name: str
    modality: Literal["video", "text"]
    encoder: str
    precision: str = "float16"
    padding: int | None = None

    def __post_init__(self) -> None:
        if self.modality not in MODALITIES:
            raise UserError(f"encoding {self.name!r}: modality={self.modality!r} must be video or text")
        if self.precision not in PRECISIONS:
            raise UserError(f"encoding {self.name!r}: precision={self.precision!r} must be {' or '.join(PRECISIONS)}")
        if self.padding is not None and (self.modality == "video" or self.padding < 1):
            raise UserError(f"encoding {self.name!r}: padding={self.padding} must be 1 or more, for a text")


def default_encodings(tokenizer: str, text_encoder: str) -> tuple[Encoding, ...]:
    return (
        Encoding(name=LATENT, modality="video", encoder=tokenizer),
        Encoding(name=TEXT, modality="text", encoder=text_encoder),
    )


def read_encodings(path: Path) -> tuple[Encoding, ...]:
    """Read encodings from a YAML file.

    Raises:
        UserError: for a missing or malformed file, a duplicate name, or if `latent` or `text` is missing.
    """
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path} is not a list of encodings")
    encodings = tuple(_read_entry(path, entry) for entry in entries)
    names = [encoding.name for encoding in encodings]
    if len(set(names)) < len(names):
        raise UserError(f"{path} uses a name twice: {', '.join(names)}")
    for name, modality in ((LATENT, "video"), (TEXT, "text")):
        if not any(encoding.name == name and encoding.modality == modality for encoding in encodings):
            raise UserError(f"{path} lists no {modality} encoding named {name!r}, which training reads")
    return encodings


def _read_entry(path: Path, entry: dict[str, Any]) -> Encoding:
    known = {field.name: field.default is MISSING for field in fields(Encoding)}
    for name in entry:
        choose_one(name, known, f"{path}: unknown key {name!r}")
    if missing := [name for name, is_needed in known.items() if is_needed and name not in entry]:
        raise UserError(f"{path}: an encoding lacks {', '.join(missing)}")
    return Encoding(**entry)


@dataclass(frozen=True, slots=True)
class Encoder:
    """An encoding with its model."""

    encoding: Encoding
    model: VideoTokenizer | TextEncoder
    device: torch.device

    @property
    def name(self) -> str:
        return self.encoding.name

    @property
    def modality(self) -> str:
        return self.encoding.modality

    @torch.inference_mode()
    def encode_videos(self, video_BCTHW: Tensor) -> Tensor:
        """Latents BCTHW, as they are stored, on the device of the videos; `checked` reads them."""
        return self.model.encode(video_BCTHW).to(self._dtype)

    @torch.inference_mode()
    def encode_texts(self, texts: list[str]) -> list[Tensor]:
        """Features LE of each text, without padding unless the encoding asks for it; none of an empty text."""
        features = self.model.encode(texts)
        stored_BLE = self.checked(features.features_BLE.to("cpu", self._dtype))
        rows = zip(stored_BLE, features.length_B.tolist(), texts, strict=True)
        return [self._padded(row_LE[:length]) if text else row_LE[:0] for row_LE, length, text in rows]

    def _padded(self, text_LE: Tensor) -> Tensor:
        length = self.encoding.padding
        if length is None:
            return text_LE.clone()
        return F.pad(text_LE[:length], (0, 0, 0, max(0, length - len(text_LE))))

    def checked(self, stored: Tensor) -> Tensor:
        """The same numbers, of any shape, on the CPU.

        Raises:
            UserError: if one is NaN or infinite.
        """
        if not torch.isfinite(stored).all():
            raise UserError(f"the encoding {self.name!r} gives NaN or infinite values as {stored.dtype}; use float32")
        return stored

    @property
    def _dtype(self) -> torch.dtype:
        return PRECISIONS[self.encoding.precision]


def load_encoder(encoding: Encoding, made: Path, device: torch.device) -> Encoder:
    """Load the encoder of an encoding; fitted ones are read from the folder `made`.

    Raises:
        UserError: if there is none.
    """
    name = encoding.encoder
    if name in BUILT_IN and name != HAAR:
        return Encoder(encoding, BUILT_IN[name](), device)
    folder = made / name if name in (HAAR, LABELS, TOKENS) else Path(name)
    load = load_tokenizer if encoding.modality == "video" else load_text_encoder
    return Encoder(encoding, on_device(load(folder), device), device)


def gather_labels(captions: Iterable[str]) -> ClassLabels:
    """Classes named by captions, in alphabetical order.

    Raises:
        UserError: if a caption is empty.
    """
    names = sorted({caption.strip().lower() for caption in captions})
    if "" in names:
        raise UserError("a picture without a label has no class: name its folder, or give --captions a table")
    return ClassLabels(names=tuple(names))


def fit_haar(videos: Iterable[Tensor], channels: int) -> tuple[HaarTokenizer, dict[int, float]]:
    """Fit a tokenizer of `channels` channels to videos (batches BCTHW), reproducibly; also return the PSNR in dB for
    each of `USUAL_CHANNELS`."""
    with one_thread():  # sums in another order would give other bytes
        return HaarTokenizer.fit_at_most(videos, channels, USUAL_CHANNELS)
