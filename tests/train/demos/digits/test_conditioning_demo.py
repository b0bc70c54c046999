"""Digits of which a part is given: their data, their score, and the demo that teaches it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megadit.models.shared.files import read_json
from megadit.train.demos.digits import conditioning_data as given_data
from megadit.train.demos.digits import conditioning_demo as given_demo
from megadit.train.demos.digits import conditioning_score as given_score
from megadit.train.demos.digits.classifier import DigitReader, Verdicts
from megadit.train.demos.digits.data import COLOURS, DIGITS, random_attributes


def attributes(count=24):
    return random_attributes(count, images=False, generator=torch.Generator().manual_seed(0))


def test_neutral_captions_name_neither_digit_nor_colour():
    words = {word for caption in given_score.neutral_captions(attributes(200)) for word in caption.split()}
    assert not words & {*COLOURS, *DIGITS, *map(str, range(10))} and {"left", "up"} <= words


def test_an_edit_changes_what_it_names_and_nothing_else():
    generator = torch.Generator().manual_seed(1)
    for place, before in enumerate(attributes(60)):
        name = list(given_data.INSTRUCTIONS)[place % 3]
        after, words = given_data.change(before, name, generator)
        assert getattr(after, name) != getattr(before, name)
        assert replace(after, **{name: getattr(before, name)}) == before
        said = {"colour": after.colour, "digit": DIGITS[after.digit], "direction": after.direction}[name]
        assert said in words or str(after.digit) in words.split(), words


def test_clips_before_and_after_differ_by_the_edit_alone():
    before = attributes()
    after = [replace(each, colour="white" if each.colour != "white" else "red") for each in before]
    sources, results = given_data.draw_edit_pairs(before, after, "train", torch.Generator().manual_seed(2))
    ink = [(video + 1).amax(1) for video in (sources, results)]
    assert ((ink[0] > 1) == (ink[1] > 1)).float().mean() > 0.99 and not torch.equal(sources, results)


class Knowing(DigitReader):
    """Reads nothing: its verdicts are given."""


def test_what_follows_the_first_frame_is_judged(monkeypatch):
    asked = attributes(4)
    colours, wordings = list(COLOURS), ["left", "right", "up", "down"]
    digit = torch.tensor([[each.digit] * 9 for each in asked])
    digit[0, 0] = (digit[0, 0] + 1) % 10  # the first frame counts for nothing
    digit[1, 5] = (digit[1, 5] + 1) % 10  # one of the later ones spoils every_frame
    digit[2, 1:6] = (digit[2, 1:6] + 1) % 10  # most of them, the majority too
    verdicts = Verdicts(
        digit,
        torch.tensor([[colours.index(each.colour)] * 9 for each in asked]),
        torch.tensor([wordings.index(each.direction) for each in asked]),
    )
    monkeypatch.setattr(given_score, "classify", lambda reader, video: verdicts)
    found = given_score.after_first(Knowing(), torch.zeros(4, 3, 9, 32, 32), asked)
    assert found == {"digit": 0.75, "every_frame": 0.5, "colour": 1.0, "direction": 1.0}


def test_values_rise_as_far_as_the_clips_can_tell():
    noise = 0.3 * torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    rising = torch.tensor([0.0, 0.5, 0.5, 1.0])[:, None] + noise
    assert given_score.rises(rising) and not given_score.rises(-rising)
    assert not given_score.rises(noise), "nothing changes"
    assert not given_score.rises(rising[[0, 3, 1, 3]]), "a step falls"
    assert not given_score.rises(rising[[0, 1, 3, 0]]), "the end is where it began"


@pytest.mark.parametrize(
    ("num_right", "offset", "is_monotone"),
    [((5, 20, 20, 29), (0.4, 0.3, 0.2, 0.1), (True, True)), ((5, 29, 12, 29), (0.1, 0.2, 0.3, 0.4), (False, False))],
)
def test_a_score_says_whether_scales_are_monotone(monkeypatch, num_right, offset, is_monotone):
    asked, scales = attributes(30), (1.0, 1.5, 2.0, 3.0)
    after = given_score.draw_edits(asked)[0]
    wordings, num_obeyed = ["left", "right", "up", "down"], [30]

    def make_edits(pipeline, instructions, sources, *, guidance=2.0, image_guidance):
        num_obeyed[0] = num_right[scales.index(guidance)]
        return given_score.video_of(given_score.pixels(sources)) + offset[scales.index(image_guidance)]

    def shown(reader, video):
        obeys = torch.arange(30) < num_obeyed[0]
        columns = ([each.digit for each in after], [list(COLOURS).index(each.colour) for each in after])
        digit, colour = (torch.where(obeys, torch.tensor(column), -1)[:, None].expand(30, 9) for column in columns)
        direction = torch.where(obeys, torch.tensor([wordings.index(each.direction) for each in after]), -1)
        return Verdicts(digit, colour, direction)

    monkeypatch.setattr(given_score, "make_edits", make_edits)
    monkeypatch.setattr(given_score, "classify", shown)
    found = given_score.edit_scales(None, Knowing(), asked, scales)
    assert (found["text_is_monotone"], found["clip_is_monotone"]) == is_monotone
    assert [found[f"text_{scale:g}_obeyed"] for scale in scales] == [round(count / 30, 4) for count in num_right]
    assert [found[f"clip_{scale:g}_distance"] for scale in scales] == pytest.approx(offset, abs=1e-3)


def test_every_option_reaches_the_demo(tmp_path, demo_of):
    options = ["--out", "elsewhere", "--bundle", str(tmp_path), "--ranks", "1", "--steps", "7", "--stride", "3"]
    expected = given_demo.ConditioningDemo(out=Path("elsewhere"), base=tmp_path, num_ranks=1, steps=7, stride=3, seed=5)
    assert demo_of(given_demo.main, *options, "--seed", "5") == expected


@pytest.mark.slow
@pytest.mark.usefixtures("forked_modules")
def test_the_demo_runs_to_its_pictures(quick_demo, tmp_path, monkeypatch):
    """From a base that was hardly trained: every stage works, whatever the figures."""
    monkeypatch.setattr(given_data, "NUM_CLIPS", 60)
    monkeypatch.setattr(
        given_data.write_conditioning, "__kwdefaults__", {"num_clips": 60, "num_edits": 30, "num_val": 8, "seed": 0}
    )
    options = ["--bundle", str(quick_demo / "bundle"), "--steps", "2", "--stride", "48", "--ranks", "1"]
    assert given_demo.main(["--out", str(tmp_path / "given"), *options]) == 0
    assert (tmp_path / "given" / "given.png").stat().st_size > 10_000
    assert (tmp_path / "given" / "edit_scales.png").stat().st_size > 10_000
    scales = read_json(tmp_path / "given" / "score.json")["edit_scales"]
    assert {"text_is_monotone", "clip_is_monotone", "text_3_obeyed", "clip_1.5_within"} <= scales.keys()
