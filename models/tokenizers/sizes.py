"""Sizes of videos that causal tokenizers can encode, and of their latents."""

import math

from megadit.models.shared.errors import UserError, nearest_multiples


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
