"""The protocol of video tokenizers.

Shapes: B batch, C channels, T/H/W frames, height, width (of the video, or of its latents).
"""

import os
from typing import Protocol

from torch import Tensor


class VideoTokenizer(Protocol):
    """Encodes videos to latents, and decodes latents."""

    latent_channels: int
    temporal_compression: int
    spatial_compression: int
    sigma_data: float
    """Standard deviation of the latents overall: measured where the tokenizer was fitted, else nominal."""
    causal: bool
    """True: a latent frame depends on no later video frame, and an image is a video of one frame."""

    def encode(self, video_BCTHW: Tensor) -> Tensor:
        """Latents (float32 BCTHW, about zero mean and standard deviation `sigma_data`) of RGB video in [-1, 1]."""

    def decode(self, latents_BCTHW: Tensor) -> Tensor:
        """RGB video (float32 BCTHW), in [-1, 1] up to errors: the caller clamps."""

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, T, H, W) of the latents of such a video.

        Raises:
            UserError: for a size that cannot be encoded; suggests the nearest sizes.
        """

    def frames_covering(self, frames: int) -> int:
        """The smallest number of frames, at least `frames`, that can be encoded; the caller cuts the tail."""

    def save(self, directory: str | os.PathLike) -> None:
        """Writes config.json and, where there are tensors, model.safetensors."""

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "VideoTokenizer":
        """The inverse of `save`."""

    def fingerprint(self) -> str:
        """A short hash, equal if tokenizers produce the same latents."""
