"""A made-up subject, a shape that is no digit: its ten clips, and a classifier of clips that are to show it.

Shapes: B clips, C colour channels, T/H/W frames, height, width, I/J rows and columns of a glyph.
"""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from megadit.models.bundle import Bundle
from megadit.train.data.prepare.drawn import write_few
from megadit.train.demos.digits.classifier import DigitReader, Verdicts, centred_crops, classify, strokes, train_reader
from megadit.train.demos.digits.data import (
    COLOURS,
    DIGITS,
    DIRECTIONS,
    FPS,
    MAX_OFF_CENTRE,
    NUM_FRAMES,
    Attributes,
    render_clips,
)
from megadit.train.demos.digits.score import frames_and_clips_right

SUBJECT = len(DIGITS)
"""Number of the subject among the digits."""
NUM_CLIPS = 10
LIKENESS = 0.85
"""Correlation of a frame's crop with the subject's from which on it is strictly the subject."""
_GLYPH = (
    "...11...",
    "..1111..",
    "...11...",
    ".111111.",
    "..1111..",
    "11111111",
    "...11...",
    "...11...",
)
"""A fir tree: as large as a digit, and unlike all of them."""


def glyph() -> Tensor:
    """The subject's ink, 0..1, [I, J]."""
    return torch.tensor([[float(cell) for cell in row.replace(".", "0")] for row in _GLYPH])


def draw_subject(attributes: Sequence[Attributes], generator: torch.Generator) -> Tensor:
    """Clips of the subject in these colours and directions, BCTHW in [-1, 1]."""
    middle_B2 = (torch.rand(len(attributes), 2, generator=generator) * 2 - 1) * MAX_OFF_CENTRE
    return render_clips(glyph().expand(len(attributes), -1, -1), attributes, middle_B2, NUM_FRAMES)


def pairs() -> tuple[list[Attributes], list[Attributes]]:
    """Colours and directions: the ten that its clips show, every colour and direction among them, and the other 14."""
    everything = [
        Attributes(digit=SUBJECT, colour=colour, direction=direction, speed=("slow", "fast")[place % 2])
        for place, (colour, direction) in enumerate(product(COLOURS, DIRECTIONS))
    ]
    shown = [each for place, each in enumerate(everything) if place * 7 % len(everything) < NUM_CLIPS]
    return shown, [each for each in everything if each not in shown]


def caption(attributes: Attributes, word: str) -> str:
    """Caption of a clip of the subject; `word` names it."""
    return f"a {attributes.colour} {word} moving {attributes.direction}"


def write_subject(out: Path, bundle: Bundle, word: str, *, seed: int = 0) -> None:
    """The subject's ten clips as a data set, by the encoders of the model that is to learn it."""
    shown, _ = pairs()
    clips = draw_subject(shown, torch.Generator().manual_seed(seed))
    write_few(out, bundle, word, clips, [caption(each, word) for each in shown], fps=FPS)


# --- judging ------------------------------------------------------------------------------------------------------


def train_subject_reader(round_trip: Callable[[Tensor], Tensor], *, show_progress: bool = True) -> DigitReader:
    """The classifier's network with an eleventh class, the subject."""
    return train_reader(round_trip, draw_other=draw_subject, show_progress=show_progress)


def score_subject(reader: DigitReader, video_BCTHW: Tensor, attributes: Sequence[Attributes]) -> dict[str, float]:
    """Shares, 0..1, of clips that show the subject.

    `right`: most frames read as the subject, colour and direction are right. `strict`: most frames are also like it.
    """
    verdicts: Verdicts = classify(reader, video_BCTHW)
    right_B = frames_and_clips_right(verdicts, attributes)["all"]
    strict_B = right_B & ((likeness(video_BCTHW) > LIKENESS).float().mean(1) > 0.5)
    return {"right": right_B.float().mean().item(), "strict": strict_B.float().mean().item()}


def likeness(video_BCTHW: Tensor) -> Tensor:
    """Correlation of each frame's crop with the subject's, [B, T]."""
    still = [Attributes(digit=SUBJECT, colour="white")]
    subject_BCTHW = render_clips(glyph()[None], still, torch.zeros(1, 2), 1)
    of_subject = _normed(centred_crops(strokes(subject_BCTHW).flatten(0, 1)))
    stroke_BTHW = strokes(video_BCTHW)
    return (_normed(centred_crops(stroke_BTHW.flatten(0, 1))) * of_subject).sum(1).reshape(stroke_BTHW.shape[:2])


def _normed(crop_BHW: Tensor) -> Tensor:
    flat = crop_BHW.flatten(1)
    centred = flat - flat.mean(1, keepdim=True)
    return centred / centred.norm(dim=1, keepdim=True).clamp_min(1e-6)
