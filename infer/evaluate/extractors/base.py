"""Interface of feature extractors for an evaluation, and the resizing of their inputs.

Shapes: B videos or pictures, T/H/W frames, height, width, C colour channels, D width of the features.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch.nn.functional as F
from torch import Tensor

Sight = Literal["pictures", "clips"]


class Extractor(Protocol):
    """uint8 BTHWC (RGB, 0..255) -> features, float32 BD."""

    name: str
    sees: Sight
    """pictures: single frames (T = 1); clips: all frames of a video at once."""
    width: int
    """Width of a feature."""
    fewest_frames: int
    """Fewest frames of a clip; 1 for pictures."""
    protocol: str
    """Preprocessing of pixels, in words: size, resampling, scale."""
    fingerprint: str
    """A short hash of its weights."""

    def __call__(self, video_BTHWC: Tensor) -> Tensor: ...


class TextExtractor(Extractor, Protocol):
    """Extractor that embeds pictures and texts in one space."""

    def of_texts(self, texts: Sequence[str]) -> Tensor:
        """Features of texts, float32 [B, D]."""


def resized(video_BTHWC: Tensor, height: int, width: int) -> Tensor:
    """Resized to float32 BCTHW, 0..255, by bicubic resampling with antialiasing and without rounding, as in clean-fid.

    (arXiv 2104.11222: without antialiasing, features depend on the size of the videos.)
    """
    num_videos, num_frames = video_BTHWC.shape[:2]
    frames_NCHW = video_BTHWC.flatten(0, 1).permute(0, 3, 1, 2).float()
    if frames_NCHW.shape[2:] != (height, width):
        frames_NCHW = F.interpolate(frames_NCHW, (height, width), mode="bicubic", antialias=True).clamp(0, 255)
    return frames_NCHW.reshape(num_videos, num_frames, -1, height, width).transpose(1, 2)
