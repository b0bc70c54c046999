"""The data set of `make demo`: clips and images of training glyphs, validation clips of held-out ones."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megadit.train.data.drawn import Chunk, Drawn
from megadit.train.digits import data as digits


def _draw(split: str, kind: str, numbers: range, generator: torch.Generator) -> Chunk:
    attributes = digits.random_attributes(len(numbers), images=kind == "image", generator=generator)
    glyphs: digits.Split = "train" if split == "train" else "heldout"
    draw = digits.draw_images if kind == "image" else digits.draw_clips
    return Chunk(
        split=split,
        keys=[f"{split}-{kind}-{number:06d}" for number in numbers],
        video_BCTHW=draw(attributes, glyphs, generator),
        captions=digits.random_captions(attributes, glyphs, generator),
        fps=0.0 if kind == "image" else digits.FPS,
    )


def _draw_fitting(count: int, generator: torch.Generator) -> Iterator[Tensor]:
    clips = digits.random_attributes(count, images=False, generator=generator)
    images = digits.random_attributes(count, images=True, generator=generator)
    yield from digits.draw_clips(clips, "train", generator).split(DIGITS.chunk)
    yield from digits.draw_images(images, "train", generator).split(DIGITS.chunk)


DIGITS = Drawn(
    name="digits",
    description="Captioned clips and images of the handwritten digits inside scikit-learn.",
    # mostly clips: token for token they teach more than images do, and cost less to read, as one is as long as three
    num_clips=32_000,
    num_images=16_000,
    num_val=480,
    draw=_draw,
    draw_fitting=_draw_fitting,
    channels=32,
)
