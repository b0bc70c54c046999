"""Captioned clips of handwritten digits in motion: the data set that needs no download.

The 1,797 handwritten 8x8 digits inside scikit-learn are drawn about 20 pixels high on 32x32 frames, in one of six
colours, moving along one of four directions at one of two speeds.

Shapes: B clips, C colour channels, T/H/W frames, height, width, I/J rows and columns of a glyph.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

import torch
from torch import Tensor

FRAME_SIZE = 32
NUM_FRAMES = 9
FPS = 8.0
GLYPH_SIZE = 8
PIXELS_PER_CELL = 2.5
"""A cell of a glyph is this wide on a frame, so that a glyph is 20 pixels high."""
MAX_OFF_CENTRE = 1.5
"""The middle of a path lies within this many pixels of the middle of the frame, along each axis."""

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = {
    "red": (1.0, 0.22, 0.20),
    "green": (0.25, 0.85, 0.30),
    "blue": (0.25, 0.45, 1.0),
    "yellow": (1.0, 0.88, 0.20),
    "purple": (0.80, 0.30, 1.0),
    "white": (1.0, 1.0, 1.0),
}
"""RGB, 0..1."""
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Unit steps along (height, width)."""
SPEEDS = {"slow": 0.6, "fast": 1.25}
"""Pixels per frame."""

Split = Literal["train", "heldout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attributes:
    """Contents of a clip as its caption describes them; an image has no direction and no speed."""

    digit: int
    colour: str
    direction: str | None = None
    speed: str | None = None

    @property
    def combination(self) -> tuple[int, str, str | None]:
        return self.digit, self.colour, self.direction


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Handwritten digits, sorted by digit: `ink_BIJ` in 0..1 and the digit that each shows."""

    ink_BIJ: Tensor
    digit_B: Tensor


# --- which digits, combinations and captions training sees --------------------------------------------------------


@cache
def load_glyphs(split: Split) -> Glyphs:
    """The digits of scikit-learn; one in five of each class, drawn once and for all, is held out of training."""
    from sklearn.datasets import load_digits

    source = load_digits()
    digit_B = torch.from_numpy(source.target).long()
    generator = torch.Generator().manual_seed(20)
    is_heldout_B = torch.zeros(len(digit_B), dtype=torch.bool)
    for digit in range(len(DIGITS)):
        members = (digit_B == digit).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=generator)]
        is_heldout_B[shuffled[: len(members) // 5]] = True
    in_split_B = is_heldout_B if split == "heldout" else ~is_heldout_B
    by_digit_B = digit_B.argsort(stable=True)
    chosen_B = by_digit_B[in_split_B[by_digit_B]]
    return Glyphs(torch.from_numpy(source.images)[chosen_B].float() / 16, digit_B[chosen_B])


def unseen_combinations() -> list[Attributes]:
    """24 of the 240 (digit, colour, direction) that training never sees.

    Each pair of colour and direction misses one digit, and each digit two or three such pairs, so that every digit,
    colour and direction is still seen in most of its company.
    """
    pairs = enumerate(product(DIRECTIONS, COLOURS))
    return [
        Attributes(digit=(7 * k + 3) % len(DIGITS), colour=colour, direction=direction)
        for k, (direction, colour) in pairs
    ]


def seen_combinations() -> list[Attributes]:
    """The other 216."""
    unseen = {attributes.combination for attributes in unseen_combinations()}
    everything = (
        Attributes(digit=digit, colour=colour, direction=direction)
        for digit, colour, direction in product(range(len(DIGITS)), COLOURS, DIRECTIONS)
    )
    return [attributes for attributes in everything if attributes.combination not in unseen]


CLIP_WORDINGS = (
    "a {colour} {digit} moving {pace} {direction}",
    "a {digit} in {colour} moving {direction} {pace}",
    "a {colour} {digit} that slides {pace} {direction}",
    "the {colour} digit {digit} moves {direction} {pace}",
    "the digit {digit} in {colour} drifts {pace} {direction}",
    "the number {digit} coloured {colour} goes {direction} {pace}",
    "{colour} {digit} {pace} sliding {direction}",
    "a video of a {colour} {digit} drifting {direction} {pace}",
)
IMAGE_WORDINGS = (
    "a {colour} {digit}",
    "a {digit} in {colour}",
    "the {colour} digit {digit}",
    "the number {digit} coloured {colour}",
    "a picture of a {colour} {digit}",
    "{colour} {digit}",
)
DIRECTION_WORDINGS = {
    "left": ("left", "to the left"),
    "right": ("right", "to the right"),
    "up": ("up", "upwards"),
    "down": ("down", "downwards"),
}
PACES = {"slow": "slowly", "fast": "quickly"}


@cache
def captions(attributes: Attributes, split: Split) -> tuple[str, ...]:
    """Every wording of these attributes in one split; about one caption in eight is held out of training.

    The hash of a caption decides, so that a held-out caption is one that training never saw, word for word. A pace is
    left unsaid in half of the wordings, and in all of them where `attributes.speed` is None.
    """
    digit_words = (DIGITS[attributes.digit], str(attributes.digit))
    wordings = IMAGE_WORDINGS if attributes.direction is None else CLIP_WORDINGS
    directions = ("",) if attributes.direction is None else DIRECTION_WORDINGS[attributes.direction]
    paces = ("",) if attributes.speed is None else ("", PACES[attributes.speed])
    worded = (
        _with_articles(wording.format(digit=digit, colour=attributes.colour, direction=direction, pace=pace))
        for wording, digit, direction, pace in product(wordings, digit_words, directions, paces)
    )
    return tuple(caption for caption in worded if _is_heldout(caption) == (split == "heldout"))


def attributes_in(prompt: str) -> Attributes | None:
    """Return the attributes that a prompt names; None if it names no digit or no colour."""
    words = re.findall(r"[a-z]+|[0-9]+", prompt.lower())
    digit = next((number for number, name in enumerate(DIGITS) if {name, str(number)} & set(words)), None)
    colour = next((colour for colour in COLOURS if colour in words), None)
    direction = next(
        (name for name, wordings in DIRECTION_WORDINGS.items() if {each.split()[-1] for each in wordings} & set(words)),
        None,
    )
    if digit is None or colour is None:
        return None
    return Attributes(digit=digit, colour=colour, direction=direction)


def _with_articles(caption: str) -> str:
    return re.sub(r"\ba (?=eight|8)", "an ", " ".join(caption.split()))


def _is_heldout(caption: str) -> bool:
    return hashlib.blake2b(caption.encode(), digest_size=8).digest()[0] < 32


# --- drawing ------------------------------------------------------------------------------------------------------


def render_clips(
    ink_BIJ: Tensor, attributes: Sequence[Attributes], middle_B2: Tensor, num_frames: int, *, zoom: int = 1
) -> Tensor:
    """Draws one moving digit per clip: BCTHW float32 in [-1, 1], light on black.

    A frame is the glyph's continuous image sampled at its pixels, R_y ink R_x^T with one row of resampling weights per
    pixel: every position, whole or not, is drawn with the same sharpness.

    Args:
        ink_BIJ: glyphs, 0..1.
        middle_B2: offset (height, width) in pixels of the middle of the path from the middle of the frame.
        zoom: the same picture in so many times as many pixels along each side; all lengths count those of zoom 1.
    """
    step_B2 = torch.tensor([_step(a) for a in attributes])
    time_T = torch.arange(num_frames) - (num_frames - 1) / 2
    centre_BT2 = middle_B2[:, None] + time_T[:, None] * step_B2[:, None]
    rows_BTHI, columns_BTWJ = (_resampling(centre_BT2[..., axis], zoom) for axis in (0, 1))
    stroke_BTHW = rows_BTHI @ ink_BIJ[:, None] @ columns_BTWJ.mT
    # A steeper edge than interpolation leaves: strokes look drawn, and stay smooth enough for subpixel motion.
    stroke_BTHW = stroke_BTHW.sub_(0.07).div_(0.85).clamp_(0, 1)
    colour_BC = torch.tensor([COLOURS[a.colour] for a in attributes])
    return (2 * colour_BC[:, :, None, None, None] * stroke_BTHW[:, None]).sub_(1)


def _step(attributes: Attributes) -> tuple[float, float]:
    """Pixels per frame along (height, width); an image stands still."""
    if attributes.direction is None or attributes.speed is None:
        return 0.0, 0.0
    dy, dx = DIRECTIONS[attributes.direction]
    return dy * SPEEDS[attributes.speed], dx * SPEEDS[attributes.speed]


def _resampling(centre_BT: Tensor, zoom: int) -> Tensor:
    """Weights [B, T, pixels, cells] that sample, at each pixel of an axis, a glyph whose middle lies at `centre_BT`."""
    pixel = (torch.arange(zoom * FRAME_SIZE) - (zoom * FRAME_SIZE - 1) / 2) / zoom
    cell = torch.arange(GLYPH_SIZE) - (GLYPH_SIZE - 1) / 2
    return _cubic((pixel[:, None] - centre_BT[..., None, None]) / PIXELS_PER_CELL - cell)


def _cubic(x: Tensor) -> Tensor:
    """Mitchell and Netravali's kernel (SIGGRAPH 1988, B = C = 1/3): interpolates without visible ringing or blocks."""
    x = x.abs()
    near = (7 * x**3 - 12 * x**2 + 16 / 3) / 6
    far = (-7 / 3 * x**3 + 12 * x**2 - 20 * x + 32 / 3) / 6
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


# --- sampling -----------------------------------------------------------------------------------------------------


def draw_clips(attributes: Sequence[Attributes], split: Split, generator: torch.Generator) -> Tensor:
    """Clips with these attributes, BCTHW in [-1, 1]: a random glyph of the digit in `split`, a random path middle."""
    ink_BIJ = _choose_ink(attributes, split, generator)
    middle_B2 = (torch.rand(len(attributes), 2, generator=generator) * 2 - 1) * MAX_OFF_CENTRE
    return render_clips(ink_BIJ, attributes, middle_B2, NUM_FRAMES)


def draw_images(attributes: Sequence[Attributes], split: Split, generator: torch.Generator, *, zoom: int = 1) -> Tensor:
    """Images with these attributes, BCTHW of one frame, anywhere that a clip's digit may pass; `zoom` as above."""
    ink_BIJ = _choose_ink(attributes, split, generator)
    direction = torch.tensor(list(DIRECTIONS.values()))[
        torch.randint(len(DIRECTIONS), (len(attributes),), generator=generator)
    ]
    travelled = (torch.rand(len(attributes), 1, generator=generator) - 0.5) * (NUM_FRAMES - 1) * max(SPEEDS.values())
    middle_B2 = (torch.rand(len(attributes), 2, generator=generator) * 2 - 1) * MAX_OFF_CENTRE
    return render_clips(ink_BIJ, attributes, middle_B2 + travelled * direction, 1, zoom=zoom)


def draw_glyphs(split: Split, index_B: Tensor, middle_B2: Tensor) -> tuple[Tensor, list[str]]:
    """Images BCTHW of these glyphs of a split, in white and `middle_B2` pixels (height, width) off the middle; and what
    each shows."""
    glyphs = load_glyphs(split)
    attributes = [Attributes(digit=digit, colour="white") for digit in glyphs.digit_B[index_B].tolist()]
    images_BCTHW = render_clips(glyphs.ink_BIJ[index_B], attributes, middle_B2, 1)
    return images_BCTHW, [DIGITS[each.digit] for each in attributes]


def random_attributes(count: int, *, images: bool, generator: torch.Generator) -> list[Attributes]:
    """Attributes of training samples: uniform over digits and colours, and over what training sees of motion."""
    colours, combinations = list(COLOURS), seen_combinations()
    if images:
        draws = torch.randint(len(DIGITS) * len(colours), (count,), generator=generator).tolist()
        return [Attributes(digit=n % len(DIGITS), colour=colours[n // len(DIGITS)]) for n in draws]
    draws = torch.randint(len(combinations) * len(SPEEDS), (count,), generator=generator).tolist()
    return [with_speed(combinations[n // len(SPEEDS)], list(SPEEDS)[n % len(SPEEDS)]) for n in draws]


def with_speed(attributes: Attributes, speed: str) -> Attributes:
    return Attributes(digit=attributes.digit, colour=attributes.colour, direction=attributes.direction, speed=speed)


def random_captions(attributes: Sequence[Attributes], split: Split, generator: torch.Generator) -> list[str]:
    """One caption each, uniform over the wordings of the split."""
    draws = torch.rand(len(attributes), generator=generator).tolist()
    choices = [captions(a, split) for a in attributes]
    return [choice[int(draw * len(choice))] for choice, draw in zip(choices, draws, strict=True)]


def _choose_ink(attributes: Sequence[Attributes], split: Split, generator: torch.Generator) -> Tensor:
    """A glyph of each digit, uniform over its writers: the glyphs lie sorted by digit."""
    glyphs = load_glyphs(split)
    count_D = glyphs.digit_B.bincount(minlength=len(DIGITS))
    digit_B = torch.tensor([a.digit for a in attributes])
    rank_B = (torch.rand(len(attributes), generator=generator) * count_D[digit_B]).long()
    return glyphs.ink_BIJ[(count_D.cumsum(0) - count_D)[digit_B] + rank_B]
