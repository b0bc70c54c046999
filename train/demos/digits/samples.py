"""The data set of `make demo`: clips and images of training glyphs, validation clips of held-out ones."""

import torch

from megadit.train.data.prepare.drawn import Drawing, Drawn
from megadit.train.data.prepare.drawn import command as drawn_command
from megadit.train.demos.digits import data as digits


def _draw(split: str, kind: str, count: int, generator: torch.Generator) -> Drawing:
    attributes = digits.random_attributes(count, images=kind == "image", generator=generator)
    glyphs: digits.Split = "train" if split == "train" else "heldout"
    draw = digits.draw_images if kind == "image" else digits.draw_clips
    return Drawing(draw(attributes, glyphs, generator), digits.random_captions(attributes, glyphs, generator))


DIGITS = Drawn(
    name="digits",
    description="Captioned clips and images of the handwritten digits inside scikit-learn.",
    # mostly clips: token for token they teach more than images do, and cost less to read, as one is as long as three
    num_clips=32_000,
    num_images=16_000,
    num_val=480,
    fps=digits.FPS,
    draw=_draw,
    channels=32,
)


def command(source: str, argv: list[str]) -> int:
    """Runs `megadit prepare digits`."""
    return drawn_command(DIGITS, argv)
