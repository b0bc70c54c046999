"""Encoding of pixel samples in the readers: `data.encode=on_the_fly`, for data of `megadit prepare --store raw`.

The frozen encoders are those of the data set; each reader process loads them with its first sample and runs them on
the CPU. Shapes: C latent channels, T/H/W frames, height, width, L text tokens, E text feature width.
"""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from megadit.infer.decoding.containers import open_container
from megadit.infer.decoding.rules import MAX_PIXELS
from megadit.models.text_encoders import load_text_encoder
from megadit.models.tokenizers import load_tokenizer
from megadit.train.data.packs.samples import OCCURRENCE, member, training_sample
from megadit.train.data.packs.training_sample import Frames, TrainingSample, drawn_index, encode_frames, frame_times
from megadit.train.dataset.description import UnreadableSampleError, read_description

MAX_CLIP_PIXELS = 1 << 30
"""Maximum number of pixels in all frames of a clip, because a small file may decode to any number."""


@dataclass(slots=True)
class FrozenEncoders:
    """Encodes crude samples of pixels; pickled without its models, which every process loads itself."""

    tokenizer_folder: Path
    text_encoder_folder: Path
    _loaded: dict[str, Any] = field(default_factory=dict)

    def __getstate__(self) -> tuple[Path, Path]:
        return self.tokenizer_folder, self.text_encoder_folder

    def __setstate__(self, folders: tuple[Path, Path]) -> None:
        self.tokenizer_folder, self.text_encoder_folder = folders
        self._loaded = {}

    def __call__(self, crude: dict[str, Any]) -> TrainingSample:
        """Encode a sample.

        Raises:
            UnreadableSampleError: naming what is wrong.
        """
        description = read_description(member(crude, "json"))
        read, content = (read_mp4, crude["mp4"]) if "mp4" in crude else (read_png, member(crude, "png"))
        try:
            frames_THWC = read(content)
        except Exception as error:  # decoders may raise anything
            raise UnreadableSampleError(f"{type(error).__name__}: {error}") from None
        if max(description.keyframes, default=0) >= len(frames_THWC):
            raise UnreadableSampleError(
                f"its keyframes {description.keyframes[:5]} exceed its {len(frames_THWC)} frames"
            )
        latent_CTHW, frames = self._latents(frames_THWC, description.keyframes)
        captions = description.captions or (description.caption,)
        caption = captions[drawn_index("caption", crude["__key__"], crude[OCCURRENCE], len(captions))]
        sample = training_sample(crude, description, latent_CTHW, self._text(caption))
        return replace(sample, frames=frames)

    @torch.inference_mode()
    def _latents(self, frames_THWC: np.ndarray, keyframes: tuple[int, ...]) -> tuple[Tensor, Frames | None]:
        """Latents of a clip, and of its frames that are encoded as images."""
        video_BCTHW = torch.from_numpy(frames_THWC).permute(3, 0, 1, 2)[None].float().div(127.5).sub(1)
        tokenizer = self._model("tokenizer")
        try:
            latent_CTHW = tokenizer.encode(video_BCTHW)[0].clone()
            if not keyframes:
                return latent_CTHW, None
            frames_CTHW = encode_frames(tokenizer.encode, video_BCTHW, keyframes)[0].clone()
        except ValueError as error:  # an unsupported size
            raise UnreadableSampleError(str(error)) from None
        return latent_CTHW, Frames(frames_CTHW, frame_times(keyframes, tokenizer))

    @torch.inference_mode()
    def _text(self, caption: str) -> Tensor:
        features = self._model("text_encoder").encode([caption])
        return features.features_BLE[0, : features.length_B[0] if caption else 0].clone()

    def _model(self, name: str) -> Any:
        if name not in self._loaded:
            is_tokenizer = name == "tokenizer"
            load, folder = (
                (load_tokenizer, self.tokenizer_folder)
                if is_tokenizer
                else (load_text_encoder, self.text_encoder_folder)
            )
            self._loaded[name] = load(folder)
        return self._loaded[name]


def read_mp4(content: bytes) -> np.ndarray:
    """Decode all frames, uint8 THWC."""
    with open_container(io.BytesIO(content), containers="mov,mp4") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        if not 0 < stream.width * stream.height <= MAX_PIXELS:
            raise ValueError(f"{stream.width}x{stream.height} pixels are too many")
        return np.stack(list(_within_limits(container.decode(stream))))


def _within_limits(frames: Iterable[av.VideoFrame]) -> Iterator[np.ndarray]:
    left = MAX_CLIP_PIXELS
    for frame in frames:
        left -= frame.width * frame.height
        if left < 0:
            raise ValueError(f"its frames have more than {MAX_CLIP_PIXELS} pixels")
        yield frame.to_ndarray(format="rgb24", threads=1)


def read_png(content: bytes) -> np.ndarray:
    """Decode an image to one frame, uint8 THWC."""
    image = Image.open(io.BytesIO(content), formats=("PNG",))
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"{image.width}x{image.height} pixels are too many")
    return np.array(image.convert("RGB"))[None]
