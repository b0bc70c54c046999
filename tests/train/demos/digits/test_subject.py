"""The made-up subject: a shape that its classifier tells from digits, and the demo that teaches it."""

from pathlib import Path

import pytest
import torch

from megadit.train.demos.digits import adapter_demo, subject
from megadit.train.demos.digits.data import COLOURS, DIRECTIONS, draw_clips, random_attributes
from megadit.train.demos.digits.score import score


def test_its_clips_show_every_colour_and_direction_and_leave_pairs_out():
    shown, unseen = subject.pairs()
    assert len(shown) == subject.NUM_CLIPS and len(shown) + len(unseen) == len(COLOURS) * len(DIRECTIONS)
    assert {each.colour for each in shown} == set(COLOURS) and {each.direction for each in shown} == set(DIRECTIONS)
    assert not {each.combination for each in shown} & {each.combination for each in unseen}


def test_likeness_tells_it_from_digits():
    generator = torch.Generator().manual_seed(0)
    shown, unseen = subject.pairs()
    assert subject.likeness(subject.draw_subject(shown + unseen, generator)).min() > subject.LIKENESS
    digits = draw_clips(random_attributes(60, images=False, generator=generator), "heldout", generator)
    assert (subject.likeness(digits) > subject.LIKENESS).float().mean() < 0.02


@pytest.mark.slow
def test_its_judge_reads_it_and_digits():
    generator = torch.Generator().manual_seed(0)
    reader = subject.train_subject_reader(lambda clips: clips, show_progress=False)
    attributes = sum(subject.pairs(), [])
    clips = subject.draw_subject(attributes, generator)
    assert subject.score_subject(reader, clips, attributes) == {"right": 1.0, "strict": 1.0}
    turned = clips.flip(2)  # backwards in time: every direction is wrong
    assert subject.score_subject(reader, turned, attributes)["right"] == 0
    of_digits = random_attributes(100, images=False, generator=generator)
    assert score(reader, draw_clips(of_digits, "heldout", generator), of_digits)["digit"] > 0.95


def test_every_option_reaches_the_demo(tmp_path, demo_of):
    options = ["--out", "elsewhere", "--bundle", str(tmp_path), "--word", "vex", "--ranks", "1", "--steps", "7"]
    expected = adapter_demo.AdapterDemo(out=Path("elsewhere"), base=tmp_path, word="vex", num_ranks=1, steps=7, seed=5)
    assert demo_of(adapter_demo.main, *options, "--seed", "5") == expected


def test_the_demo_wants_a_bundle(tmp_path, capsys):
    assert adapter_demo.main(["--bundle", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert "run `megadit demo` first" in capsys.readouterr().err and not (tmp_path / "out").exists()
