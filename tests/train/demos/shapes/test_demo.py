"""The demo of scenes: its options reach it, its score is that of the classifier, and every stage runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json
from megadit.train.demos.shapes import demo as demo_module
from megadit.train.demos.shapes import score
from megadit.train.demos.shapes.demo import QUICK, ShapesDemo
from megadit.train.demos.shapes.edits import CHANGES

from ...conftest import FEW_STEPS


def test_every_option_reaches_the_demo(tmp_path, monkeypatch, demo_of):
    monkeypatch.setattr(demo_module, "ranks_that_gain", lambda: 2)
    expected = ShapesDemo(out=tmp_path, size=QUICK, num_ranks=1)
    assert demo_of(demo_module.main, "--out", str(tmp_path), "--ranks", "1", "--quick") == expected
    assert demo_of(demo_module.main) == ShapesDemo(out=Path("runs/demo-shapes"), num_ranks=2)


def test_no_ranks(tmp_path):
    with pytest.raises(UserError, match="--ranks=0 must be at least 1"):
        demo_module.main(["--out", str(tmp_path), "--ranks", "0", "--debug"])


def test_real_clips_have_the_best_score_and_those_of_other_scenes_none():
    scenes = score.scored_scenes(12)["pair_unseen"]
    clips = demo_module.real_clips(scenes)
    assert score.score(clips, scenes)["all"] == 1.0
    found = score.score(clips, [replace(each, other_colour="red") for each in scenes])
    told_red = sum(each.other_colour == "red" for each in scenes)
    assert found["all"] == round(told_red / 12, 4) and found["interval"][0] <= found["all"] <= found["interval"][1]


def test_seen_and_unseen_scenes_are_scored_apart():
    for kind, scenes in score.scored_scenes(20).items():
        assert len(scenes) == 20 and {each.is_unseen for each in scenes} == {kind.endswith("unseen")}
        assert {each.num_things for each in scenes} == {score.GROUPS[kind][0]}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_modules")
def test_the_demo_runs_to_its_pictures(tmp_path, monkeypatch):
    """Hardly trained: every stage works, whatever the figures; real clips are read after the tokenizer."""
    overrides = {name: getattr(QUICK, name) + FEW_STEPS for name in ("overrides", "adapter_overrides")}
    small = replace(QUICK, num_clips=30, num_images=30, num_scored=3, **overrides)
    monkeypatch.setattr(demo_module, "QUICK", small)
    assert demo_module.main(["--out", str(tmp_path / "demo"), "--quick", "--ranks", "1"]) == 0
    found = read_json(tmp_path / "demo" / "score.json")
    for kind in score.GROUPS:
        assert found["real"][kind]["all"] == 1.0 and found["text"][kind]["num_clips"] == small.num_scored
    assert found["adapter"].keys() == found["no_adapter"].keys() and found["edited"].keys() == set(CHANGES)
    for name in demo_module.SHEETS:
        assert (tmp_path / "demo" / name).stat().st_size > 10_000
    assert len(list((tmp_path / "demo" / "videos").iterdir())) >= 3
