"""The data set of `make demo-shapes`: scenes of one thing and of two, clips and images."""

import torch

from megadit.train.data.prepare.drawn import Drawing, Drawn
from megadit.train.data.prepare.drawn import command as drawn_command
from megadit.train.demos.shapes import data as shapes


def _draw(split: str, kind: str, count: int, generator: torch.Generator) -> Drawing:
    """Two things in three of five, in any order; training and validation draw alike."""
    images, num_pairs = kind == "image", 3 * count // 5
    actions = shapes.IN_TRAINING[kind]
    scenes = shapes.random_scenes(count - num_pairs, 1, generator, actions=actions)
    scenes += shapes.random_scenes(num_pairs, 2, generator, actions=actions)
    scenes = [scenes[place] for place in torch.randperm(count, generator=generator).tolist()]
    return Drawing(
        video_BCTHW=shapes.draw_scenes(scenes, generator, 1 if images else shapes.NUM_FRAMES),
        captions=shapes.random_captions(scenes, generator),
        image_captions=None if images else [shapes.neutral_caption(scene, generator) for scene in scenes],
    )


SHAPES = Drawn(
    name="shapes",
    description="Captioned scenes of one thing or two that move, turn, grow or change colour.",
    # mostly clips, as those of digits
    num_clips=18_000,
    num_images=6_000,
    num_val=480,
    fps=shapes.FPS,
    draw=_draw,
    channels=64,
    spatial_compression=16,
    chunk=50,  # larger ones are given back to the system, page by page
)


def command(source: str, argv: list[str]) -> int:
    """Runs `megadit prepare shapes`."""
    return drawn_command(SHAPES, argv)
