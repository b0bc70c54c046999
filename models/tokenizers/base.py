"""The protocol of video tokenizers, and the sizes that causal ones can encode.

Shapes: B batch, C channels, T/H/W frames, height, width (of the video, or of its latents).
"""

import math
import os
from typing import Protocol

from torch import Tensor

from megadit.models.shared.errors import UserError, nearest_multiples


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


def latent_size(frames: int, height: int, width: int, *, temporal: int, spatial: int) -> tuple[int, int, int]:
    """(T, H, W) of the latents of such a video; `temporal` and `spatial` are the compression factors.

    Raises:
        UserError: for a size that cannot be encoded; suggests the nearest sizes.
    """
    if frames < 1 or (frames - 1) % temporal:
        rule = f"take 1 + a multiple of {temporal}, {nearest_multiples(frames, temporal, plus=1)}"
        raise UserError(f"{frames} frames cannot be encoded: {rule}")
    for name, size in (("height", height), ("width", width)):
        if size < 1 or size % spatial:
            rule = f"take a multiple of {spatial}, {nearest_multiples(size, spatial)}"
            raise UserError(f"{name} {size} cannot be encoded: {rule}")
    return 1 + (frames - 1) // temporal, height // spatial, width // spatial


def frames_covering(frames: int, temporal: int) -> int:
    """The smallest number of frames, at least `frames`, that can be encoded."""
    return 1 + math.ceil(max(frames - 1, 0) / temporal) * temporal
