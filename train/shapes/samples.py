"""The data set of `make demo-shapes`: scenes of one thing and of two, clips and images."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megadit.train.data.drawn import Chunk, Drawn
from megadit.train.shapes import data as shapes


def _scenes(count: int, images: bool, generator: torch.Generator) -> list[shapes.Scene]:
    """Two things in three of five."""
    num_pairs = 3 * count // 5
    scenes = shapes.random_scenes(count - num_pairs, 1, generator, images=images)
    return scenes + shapes.random_scenes(num_pairs, 2, generator, images=images)


def _draw(split: str, kind: str, numbers: range, generator: torch.Generator) -> Chunk:
    images = kind == "image"
    scenes = _scenes(len(numbers), images, generator)
    scenes = [scenes[place] for place in torch.randperm(len(scenes), generator=generator).tolist()]
    return Chunk(
        split=split,
        keys=[f"{split}-{kind}-{number:06d}" for number in numbers],
        video_BCTHW=shapes.draw_scenes(scenes, generator, 1 if images else shapes.NUM_FRAMES),
        captions=shapes.random_captions(scenes, generator),
        fps=0.0 if images else shapes.FPS,
        given_captions=None if images else [shapes.neutral_caption(scene, generator) for scene in scenes],
    )


def _draw_fitting(count: int, generator: torch.Generator) -> Iterator[Tensor]:
    for images in (False, True):
        scenes = _scenes(count, images, generator)
        for first in range(0, count, SHAPES.chunk):
            part = scenes[first : first + SHAPES.chunk]
            yield shapes.draw_scenes(part, generator, 1 if images else shapes.NUM_FRAMES)


SHAPES = Drawn(
    name="shapes",
    description="Captioned scenes of one thing or two that move, turn, grow or change colour.",
    num_clips=14_000,
    num_images=14_000,
    num_val=480,
    draw=_draw,
    draw_fitting=_draw_fitting,
    channels=48,
    spatial_compression=16,
    chunk=50,  # larger ones are given back to the system, page by page
)
