"""`megadit demo-reward`: what its scorer rewards, its options, and a small run to its picture."""

from pathlib import Path

import pytest
import torch

from megadit.models.shared.files import read_json
from megadit.train.demos.digits import reward_demo
from megadit.train.demos.digits.data import draw_clips
from megadit.train.demos.digits.reward_demo import RewardDemo, pixels_left
from megadit.train.reward import command as reward

from ...conftest import FEW_STEPS


def test_the_scorer_sees_how_far_left_a_digit_lies(tmp_path):
    demo = RewardDemo(out=tmp_path, base=tmp_path)
    clips = draw_clips(demo.attributes[:32], "heldout", torch.Generator().manual_seed(0)) / 2 + 0.5
    assert {each.direction for each in demo.attributes} == {"up", "down"}
    assert pixels_left(clips).abs().max() < 3, "digits of the data set lie about the middle"
    moved = pixels_left(clips.roll(-4, dims=4)) - pixels_left(clips)
    assert torch.allclose(moved, torch.full_like(moved, 4.0), atol=1e-3)
    assert pixels_left(torch.zeros(1, 3, 2, 8, 8)).tolist() == [[3.5, 3.5]], "nothing is nowhere"


def test_every_option_reaches_the_demo(tmp_path, demo_of):
    more = ["--out", "elsewhere", "--bundle", str(tmp_path), "--ranks", "1", "--rounds", "2", "--seed", "5"]
    expected = RewardDemo(out=Path("elsewhere"), base=tmp_path, num_ranks=1, rounds=2, prompts_per_round=3, seed=5)
    assert demo_of(reward_demo.main, *more, "--prompts_per_round", "3") == expected
    assert reward_demo.main(["--bundle", str(tmp_path / "none")]) == 2


def reward_in_few_steps(module, *words):
    assert module == reward.__name__
    assert reward.main([*words, "--train_steps", "2", *FEW_STEPS]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked_modules")
def test_the_demo_runs_to_its_picture(quick_demo, tmp_path, monkeypatch):
    """Its rounds in this process, with few steps; what they start is forked."""
    out = tmp_path / "out"
    monkeypatch.setattr(reward_demo, "run_module", reward_in_few_steps)
    few = RewardDemo(out=out, base=quick_demo).attributes[::12]
    monkeypatch.setattr(RewardDemo, "attributes", few)
    more = ["--bundle", str(quick_demo / "bundle"), "--out", str(out), "--ranks", "1", "--rounds", "1"]
    assert reward_demo.main([*more, "--prompts_per_round", "2"]) == 0
    found = read_json(out / "score.json")
    assert 0 <= found["after"]["left"] <= 1 and found["after"]["num_clips"] == len(few) == found["before"]["num_clips"]
    assert found["comparison"]["spread"] > 0 and (out / "rewarded.png").stat().st_size > 10_000
    scores = read_json(out / "reward" / "round_001" / "rollouts" / "scores.json")
    assert {"all", "left", "diversity"} <= scores["means"].keys() and scores["rewarded"] == 16
