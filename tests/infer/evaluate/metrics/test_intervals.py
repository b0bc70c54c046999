"""Intervals hold what they say: by drawing many data sets whose truth is known."""

import pytest
import torch

from megadit.infer.evaluate.metrics.intervals import Estimate, mean_estimate, resamplings, wilson
from megadit.infer.evaluate.metrics.table import clip_estimate


def test_videos_of_a_prompt_are_drawn_together():
    weight_RN = resamplings(["a", "b", "a", "c"], "made", 500)
    assert weight_RN.shape == (500, 4)
    assert (weight_RN[:, 0] == weight_RN[:, 2]).all() and not (weight_RN[:, 0] == weight_RN[:, 1]).all()
    assert weight_RN.mean(0) == pytest.approx(torch.ones(4).double(), abs=0.1)


def test_sides_are_drawn_apart_and_models_alike():
    prompts = [f"prompt {n}" for n in range(9)]
    assert (resamplings(prompts, "made") == resamplings(list(range(9)), "made")).all()
    assert not (resamplings(prompts, "made") == resamplings(prompts, "real")).all()


def covered(prompts_alike: bool, groups_known: bool) -> int:
    """Of 200 data sets of 60 videos, four of each prompt, how often the interval of a mean holds the truth (0)."""
    generator, hits = torch.Generator().manual_seed(0), 0
    groups = torch.arange(15).repeat_interleave(4).tolist() if groups_known else range(60)
    weight_RN = resamplings(groups, "made")
    for _ in range(200):
        value_N = torch.randn(60, generator=generator)
        if prompts_alike:
            value_N = value_N + 2 * torch.randn(15, generator=generator).repeat_interleave(4)
        low, high = mean_estimate(value_N, weight_RN).interval
        hits += low <= 0 <= high
    return hits


def test_the_interval_of_a_mean_holds_the_truth():
    assert covered(prompts_alike=False, groups_known=False) >= 182
    assert covered(prompts_alike=True, groups_known=True) >= 176  # fifteen prompts are few


def test_ignoring_prompts_would_be_overconfident():
    """The control: the same data, whose videos of one prompt are taken for independent."""
    assert covered(prompts_alike=True, groups_known=False) < 150


def test_shares_near_one_keep_an_interval():
    """Wilson (1927), eq. 3: of 10 of 10 the lower end is 1 / (1 + z^2 / 10)."""
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-3)
    assert mean_estimate(torch.ones(10), resamplings(range(10), "made")).interval[0] == pytest.approx(0.7225, abs=1e-3)


def test_what_two_models_share_drops_out_of_their_difference():
    generator = torch.Generator().manual_seed(0)
    hard_N = 5 * torch.randn(300, generator=generator)  # prompts are easy or hard for both
    first, second = (hard_N + torch.randn(300, generator=generator) + shift for shift in (0.5, 0.0))
    weight_RN = resamplings(range(300), "made")
    a, b = mean_estimate(first, weight_RN), mean_estimate(second, weight_RN)
    low, high = (a - b).interval
    assert 0 < low < 0.5 + 0.2 and (high - low) < 0.4 < (a.interval[1] - a.interval[0])


def test_noise_and_bounds_enter_the_interval():
    still = torch.zeros(5, dtype=torch.float64)
    low, high = Estimate(value=1.0, resampled_R=still, count=3, noise=0.5).interval
    assert (low, high) == pytest.approx((1 - 0.98, 1 + 0.98), abs=1e-3)
    assert Estimate(value=1.0, resampled_R=still, count=3, noise=5.0, bounds=(0.0, 100.0)).interval[0] == 0


def test_a_clip_score_is_not_below_zero():
    frames_NFD = torch.randn(8, 2, 6, generator=torch.Generator().manual_seed(0))
    far, near = (
        clip_estimate(frames_NFD, sign * frames_NFD.mean(1), resamplings(range(8), "made")) for sign in (-1, 1)
    )
    assert far.value == far.interval[0] == 0 < near.interval[0] < near.value < 100
