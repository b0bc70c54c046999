"""Tiled encoding and decoding, whose memory does not grow with the video.

In time, a chunk begins `context` latent frames early, and their output is discarded; in space, neighbouring tiles
overlap and are blended. This is exact for a tokenizer of independent patches (Haar), and an approximation for networks
with normalisation or attention over a frame.

Shapes: B batch, C channels, T/H/W frames, height, width (of the video, or of its latents).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megadit.models.shared.errors import UserError

Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Sizes of the tiles and chunks, in latent pixels and latent frames.

    Raises:
        UserError: for an overlap or context that leaves no room.
    """

    side: int = 64
    """Height and width of a tile."""
    overlap: int = 16
    """Overlap of neighbouring tiles."""
    frames: int = 16
    """Latent frames in a chunk, context included."""
    context: int = 4
    """Latent frames before a chunk that are decoded as its past and discarded; at least 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < self.side:
            raise UserError(f"overlap={self.overlap} must be at least 0 and smaller than side={self.side}")
        if not 1 <= self.context < self.frames:
            raise UserError(f"context={self.context} must be at least 1 and smaller than frames={self.frames}")


def encode_in_tiles(encode: Transform, video_BCTHW: Tensor, tiles: Tiles, temporal: int, spatial: int) -> Tensor:
    """Latents BCTHW: encode(video) by tiles; `temporal` and `spatial` are the compression factors."""
    num_latents = 1 + (video_BCTHW.shape[2] - 1) // temporal
    chunks = []
    for first, last, skip in _tiles(num_latents, tiles):
        # the frame that closes the first latent stands for all before it
        chunk = video_BCTHW[:, :, temporal * first : temporal * (last - 1) + 1]
        chunks.append(_in_space(encode, chunk, tiles, 1 / spatial, spatial)[:, :, skip:])
    return torch.cat(chunks, dim=2)


def decode_in_tiles(decode: Transform, latents_BCTHW: Tensor, tiles: Tiles, temporal: int, spatial: int) -> Tensor:
    """Video BCTHW: decode(latents) by tiles."""
    chunks = []
    for first, last, skip in _tiles(latents_BCTHW.shape[2], tiles):
        chunk = _in_space(decode, latents_BCTHW[:, :, first:last], tiles, spatial, 1)
        # the first of the skipped latents decodes to one frame, the others to `temporal` each
        chunks.append(chunk[:, :, 1 + (skip - 1) * temporal if skip else 0 :])
    return torch.cat(chunks, dim=2)


def _tiles(num_latents: int, tiles: Tiles) -> Iterator[tuple[int, int, int]]:
    """(first, last, skip): latents first..last-1 are computed together, and the first `skip` discarded."""
    yield 0, min(tiles.frames, num_latents), 0
    done = tiles.frames
    while done < num_latents:
        first = done - tiles.context
        last = min(first + tiles.frames, num_latents)
        yield first, last, tiles.context
        done = last


def _in_space(transform: Transform, x_BCTHW: Tensor, tiles: Tiles, scale: float, unit: int) -> Tensor:
    """transform(x), whose height and width are `scale` times those of x, in blended tiles of `unit * side`."""
    side, overlap = tiles.side * unit, tiles.overlap * unit
    height, width = x_BCTHW.shape[-2:]
    if height <= side and width <= side:
        return transform(x_BCTHW)
    total = weights = None
    ramp = round(overlap * scale)
    for top in _starts(height, side, overlap):
        for left in _starts(width, side, overlap):
            tile = transform(x_BCTHW[..., top : top + side, left : left + side])
            weight_HW = _weight(tile, ramp, top > 0, left > 0, top + side < height, left + side < width)
            if total is None:
                size = (round(height * scale), round(width * scale))
                total = tile.new_zeros(*tile.shape[:-2], *size)
                weights = tile.new_zeros(size)
            rows = slice(round(top * scale), round(top * scale) + tile.shape[-2])
            columns = slice(round(left * scale), round(left * scale) + tile.shape[-1])
            total[..., rows, columns] += tile * weight_HW
            weights[rows, columns] += weight_HW
    return total / weights


def _starts(size: int, side: int, overlap: int) -> list[int]:
    """Starts of tiles along an axis; the last tile ends with the frame, and may overlap more."""
    if size <= side:
        return [0]
    step = side - overlap
    return [*range(0, size - side, step), size - side]


def _weight(tile: Tensor, ramp: int, above: bool, left: bool, below: bool, right: bool) -> Tensor:
    """Blending weight, which falls towards each edge with a neighbour: [H, W] in (0, 1]."""

    def along(length: int, before: bool, after: bool) -> Tensor:
        weight = torch.ones(length, device=tile.device, dtype=tile.dtype)
        slope = torch.arange(1, ramp + 1, device=tile.device, dtype=tile.dtype) / (ramp + 1)
        if before and ramp:
            weight[:ramp] *= slope
        if after and ramp:
            weight[-ramp:] *= slope.flip(0)
        return weight

    return along(tile.shape[-2], above, below)[:, None] * along(tile.shape[-1], left, right)
