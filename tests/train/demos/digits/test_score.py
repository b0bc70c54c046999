"""The score counts what it says: frames for digits, clips for the rest, a majority of frames for a whole clip."""

import pytest
import torch

from megadit.train.demos.digits import data as digits
from megadit.train.demos.digits import score
from megadit.train.demos.digits.classifier import NONE, Verdicts
from megadit.train.demos.digits.data import COLOURS, DIRECTIONS, Attributes

CLIP = Attributes(digit=7, colour="red", direction="left", speed="slow")


def verdicts(num_digits_right: int, num_colours_right: int, direction: str = "left") -> Verdicts:
    frames = torch.arange(9)[None]
    return Verdicts(
        digit_BT=torch.where(frames < num_digits_right, 7, 1),
        colour_BT=torch.where(frames < num_colours_right, list(COLOURS).index("red"), NONE),
        direction_B=torch.tensor([list(DIRECTIONS).index(direction)]),
    )


def scored(monkeypatch, verdict: Verdicts) -> dict:
    monkeypatch.setattr(score, "classify", lambda reader, video: verdict)
    return score.score(None, torch.empty(0), [CLIP])


@pytest.mark.parametrize(
    ("digits_right", "colours_right", "direction", "expected"),
    [
        (9, 9, "left", {"digit": 1, "colour": 1, "direction": 1, "all": 1, "every_frame": 1}),
        (5, 9, "left", {"digit": 0.5556, "colour": 1, "direction": 1, "all": 1, "every_frame": 0}),
        (4, 9, "left", {"digit": 0.4444, "colour": 1, "direction": 1, "all": 0, "every_frame": 0}),
        (9, 4, "left", {"digit": 1, "colour": 0, "direction": 1, "all": 0, "every_frame": 0}),
        (9, 9, "right", {"digit": 1, "colour": 1, "direction": 0, "all": 0, "every_frame": 0}),
    ],
)
def test_shares(monkeypatch, digits_right, colours_right, direction, expected):
    result = scored(monkeypatch, verdicts(digits_right, colours_right, direction))
    assert result == {**expected, "num_clips": 1}


def test_every_combination_is_scored_once_per_speed_on_captions_never_trained_on():
    seen, unseen = score.scored_attributes()
    assert len(seen) == len(set(seen)) == 432 and len(unseen) == 96
    assert {a.combination for a in seen} == {a.combination for a in digits.seen_combinations()}
    assert {a.combination for a in unseen} == {a.combination for a in digits.unseen_combinations()}
    for attributes, caption in zip(seen + unseen, score.heldout_captions(seen + unseen), strict=True):
        assert caption in digits.captions(attributes, "heldout")
        assert caption not in digits.captions(attributes, "train")
