"""The score of the demo: how many generated clips show what their captions say.

Shapes: B clips, C colour channels, T/H/W frames, height, width.
"""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from megadit.train.digits.data import (
    COLOURS,
    DIRECTIONS,
    SPEEDS,
    Attributes,
    draw_clips,
    random_captions,
    seen_combinations,
    unseen_combinations,
    with_speed,
)
from megadit.train.digits.judge import DigitReader, Verdicts, judge

CAPTIONS_PER_UNSEEN = 2
"""Captions of each unseen combination and speed; one of each seen combination and speed."""


def scored_attributes() -> tuple[list[Attributes], list[Attributes]]:
    """What is generated for the score: every combination training saw (432 clips) and every one it did not (96)."""
    seen = [with_speed(attributes, speed) for attributes, speed in product(seen_combinations(), SPEEDS)]
    unseen = [with_speed(attributes, speed) for attributes, speed in product(unseen_combinations(), SPEEDS)]
    return seen, unseen * CAPTIONS_PER_UNSEEN


def heldout_captions(attributes: Sequence[Attributes], seed: int = 0) -> list[str]:
    """Captions that training never saw, word for word."""
    return random_captions(attributes, "heldout", torch.Generator().manual_seed(seed))


def real_clips(attributes: Sequence[Attributes], seed: int = 0) -> Tensor:
    """Clips with these attributes of handwriting that neither training nor the judge saw, BCTHW in [-1, 1]."""
    return draw_clips(attributes, "heldout", torch.Generator().manual_seed(seed))


def frames_and_clips_right(verdicts: Verdicts, attributes: Sequence[Attributes]) -> dict[str, Tensor]:
    """What is right: `digit` and `colour` bool [B, T] for each frame, `direction` and `all` bool [B] for each clip.

    `all`: digit and colour in more than half of the frames, and the direction.
    """
    colours, directions = list(COLOURS), list(DIRECTIONS)
    wanted_digit_B = torch.tensor([a.digit for a in attributes])
    wanted_colour_B = torch.tensor([colours.index(a.colour) for a in attributes])
    wanted_direction_B = torch.tensor([directions.index(a.direction) for a in attributes])
    digit_BT = verdicts.digit_BT == wanted_digit_B[:, None]
    colour_BT = verdicts.colour_BT == wanted_colour_B[:, None]
    direction_B = verdicts.direction_B == wanted_direction_B
    all_B = _in_most_frames(digit_BT) & _in_most_frames(colour_BT) & direction_B
    return {"digit": digit_BT, "colour": colour_BT, "direction": direction_B, "all": all_B}


def right_in_every_frame(right: dict[str, Tensor]) -> Tensor:
    """Of what `frames_and_clips_right` gives: digit and colour in every single frame, and the direction, bool [B]."""
    return (right["digit"] & right["colour"]).all(1) & right["direction"]


def _in_most_frames(right_BT: Tensor) -> Tensor:
    return right_BT.float().mean(1) > 0.5


def score(reader: DigitReader, video_BCTHW: Tensor, attributes: Sequence[Attributes]) -> dict[str, float | int]:
    """Shares, 0..1, of what is right in these clips.

    `digit`: of frames. `colour`, `direction`, `all`: of clips, by the majority of frames. `every_frame`: of clips
    whose digit and colour are right in every single frame, and their direction: what a clip that morphs fails.
    """
    right = frames_and_clips_right(judge(reader, video_BCTHW), attributes)
    shares = {
        "digit": right["digit"],
        "colour": _in_most_frames(right["colour"]),
        "direction": right["direction"],
        "all": right["all"],
        "every_frame": right_in_every_frame(right),
    }
    return {
        **{name: round(share.float().mean().item(), 4) for name, share in shares.items()},
        "num_clips": len(attributes),
    }
