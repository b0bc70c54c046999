"""The score of the demo: how many generated clips show what their captions say.

Shapes: B clips, C colour channels, T/H/W frames, height, width.
"""

import shutil
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megadit.train.demos.clips import as_float
from megadit.train.demos.digits.classifier import NONE, DigitReader, Verdicts, classify, load_reader
from megadit.train.demos.digits.data import (
    COLOURS,
    DIRECTIONS,
    SPEEDS,
    Attributes,
    attributes_in,
    draw_clips,
    random_captions,
    seen_combinations,
    unseen_combinations,
    with_speed,
)

CAPTIONS_PER_UNSEEN = 2
"""Captions of each unseen combination and speed; one of each seen combination and speed."""


def scored_attributes() -> tuple[list[Attributes], list[Attributes]]:
    """Attributes of scored clips: all combinations in the training set (432 clips), and all that are not (96)."""
    seen = [with_speed(attributes, speed) for attributes, speed in product(seen_combinations(), SPEEDS)]
    unseen = [with_speed(attributes, speed) for attributes, speed in product(unseen_combinations(), SPEEDS)]
    return seen, unseen * CAPTIONS_PER_UNSEEN


def heldout_captions(attributes: Sequence[Attributes], seed: int = 0) -> list[str]:
    """Captions that training never saw, word for word."""
    return random_captions(attributes, "heldout", torch.Generator().manual_seed(seed))


def real_clips(attributes: Sequence[Attributes], seed: int = 0) -> Tensor:
    """Clips with these attributes of handwriting that neither training nor the classifier saw, BCTHW in [-1, 1]."""
    return draw_clips(attributes, "heldout", torch.Generator().manual_seed(seed))


def frames_and_clips_right(verdicts: Verdicts, attributes: Sequence[Attributes]) -> dict[str, Tensor]:
    """Compare verdicts with attributes: `digit` and `colour` bool [B, T] for each frame, `direction` and `all` bool
    [B].

    `all`: digit and colour in more than half of the frames, and the direction. Without a direction, the clip must not
    move.
    """
    colours, directions = list(COLOURS), list(DIRECTIONS)
    expected_digit_B = torch.tensor([a.digit for a in attributes])
    expected_colour_B = torch.tensor([colours.index(a.colour) for a in attributes])
    expected_direction_B = torch.tensor([directions.index(a.direction) if a.direction else NONE for a in attributes])
    digit_BT = verdicts.digit_BT == expected_digit_B[:, None]
    colour_BT = verdicts.colour_BT == expected_colour_B[:, None]
    direction_B = verdicts.direction_B == expected_direction_B
    right = {"digit": digit_BT, "colour": colour_BT, "direction": direction_B}
    return right | {"all": torch.stack(list(by_majority(right).values())).all(0)}


def by_majority(right: dict[str, Tensor]) -> dict[str, Tensor]:
    """`digit` and `colour` in more than half of the frames, and `direction`, bool [B]; `right` as of
    `frames_and_clips_right`."""
    in_most = {name: right[name].float().mean(1) > 0.5 for name in ("digit", "colour")}
    return in_most | {"direction": right["direction"]}


def right_in_every_frame(right: dict[str, Tensor]) -> Tensor:
    """Whether digit and colour are right in every single frame, and the direction, bool [B]; `right` as of
    `frames_and_clips_right`."""
    return (right["digit"] & right["colour"]).all(1) & right["direction"]


def score(reader: DigitReader, video_BCTHW: Tensor, attributes: Sequence[Attributes]) -> dict[str, float | int]:
    """Shares, 0..1, of what is right in these clips.

    `digit`: of frames. `colour`, `direction`, `all`: of clips, by the majority of frames. `every_frame`: of clips
    whose digit and colour are right in every single frame, and their direction: what a clip that morphs fails.
    """
    right = frames_and_clips_right(classify(reader, video_BCTHW), attributes)
    shares = right | {"colour": by_majority(right)["colour"], "every_frame": right_in_every_frame(right)}
    means = {name: round(share.float().mean().item(), 4) for name, share in shares.items()}
    return {**means, "num_clips": len(attributes)}


_SCORER = '''"""The classifier of digits, for a service, and for figures.

    megadit serve build-repository BUNDLE OUT --scorer_dir THIS_FOLDER
    megadit evaluate BUNDLE --real REAL --out OUT --scorer_dir THIS_FOLDER
"""

from pathlib import Path

from megadit.train.demos.digits.score import BETTER, scorer_of_prompts

score = scorer_of_prompts(Path(__file__).with_name("classifier.safetensors"))
'''
"""The program that `infer/hooks/scorer.py` runs."""
SCORER_DIR = "scorer"
"""The folder of that program, beside a demo's bundle."""
BETTER = {"all": "higher", "every_frame": "higher"}
"""Names of the scores that are metrics."""


def write_scorer(folder: Path, reader_file: Path) -> None:
    """The folder of a classifier by the network in a file, which it gets a copy of."""
    folder.mkdir(exist_ok=True)
    shutil.copy(reader_file, folder / "classifier.safetensors")
    (folder / "scorer.py").write_text(_SCORER, encoding="utf-8")


def scorer_of_prompts(path: Path) -> Callable[[np.ndarray, str], dict[str, float]]:
    """A scorer of videos (uint8 THWC) by the classifier in a file: shares, 0..1, of frames with the prompt's digit and
    colour, and whether its direction, and all three, are right, these in every frame too; {} for other prompts.
    """
    reader = load_reader(path)

    def scores(video_THWC: np.ndarray, prompt: str) -> dict[str, float]:
        expected = attributes_in(prompt)
        if expected is None:
            return {}
        video_1CTHW = as_float(torch.from_numpy(video_THWC).permute(3, 0, 1, 2)[None])
        right = frames_and_clips_right(classify(reader, video_1CTHW), [expected])
        right["every_frame"] = right_in_every_frame(right)
        return {name: share.float().mean().item() for name, share in right.items()}

    return scores
