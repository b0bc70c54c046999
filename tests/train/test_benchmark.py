"""Comparisons with diffusers and with padding: both sides compute the same amount, and the figures are told."""

import dataclasses
import json

import pytest
import torch

from megadit.infer import side_by_side
from megadit.infer.benchmark import compare_sampling
from megadit.infer.side_by_side import COSMOS, DIT, Comparison, Inputs, call_theirs, compare, networks, show
from megadit.models.support import UserError


def smaller(setting):
    text = 2 if setting.config.num_classes else 96
    config = dataclasses.replace(
        setting.config, num_layers=2, hidden_size=96, num_attention_heads=4, crossattn_emb_size=text
    )
    return dataclasses.replace(setting, config=config, latents=(setting.latents[0], 16, 16))


@pytest.fixture
def small_settings(monkeypatch):
    """Both settings, small enough for a test."""
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    cosmos, dit = smaller(COSMOS), smaller(DIT)
    monkeypatch.setattr(side_by_side, "COSMOS", cosmos)
    return cosmos, dit


def matmul_flops(call):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        call()
    return counter.get_total_flops()


@pytest.mark.slow
def test_both_sides_do_the_same_work(small_settings):
    for setting in small_settings:
        ours, theirs = networks(setting, torch.float32)
        inputs = Inputs.of(setting, torch.float32)
        mine = matmul_flops(lambda: ours(inputs.x_BCTHW, inputs.c_noise_B, inputs.conditioning))  # noqa: B023
        other = matmul_flops(lambda: call_theirs(setting, theirs, inputs))  # noqa: B023
        # embedders differ, and count little
        assert mine == pytest.approx(other, rel=0.05), setting.name


@pytest.mark.slow
def test_sampling_training_and_packing_are_compared(small_settings):
    from megadit.train.benchmark import compare_packing, compare_training

    for setting in small_settings:
        for dtype in (torch.float32, torch.bfloat16):
            comparisons = [*compare_sampling(setting, dtype, 1), *compare_training(setting, dtype, 1)]
            assert all(one.ratio > 0 and setting.name in one.name for one in comparisons)
    assert compare_packing(1).limit == pytest.approx(0.5556, abs=1e-3)


def test_the_ratio_is_that_of_neighbours():
    one = Comparison("x", [1.0, 10.0, 4.0], [2.0, 20.0, 4.0], limit=0.75)
    assert one.ratios == [0.5, 0.5, 1.0] and one.ratio == 0.5
    with pytest.raises(UserError, match="--rounds 0"):
        compare("x", lambda: None, lambda: None, 0)


def test_what_is_slower_than_allowed_is_marked(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    file = tmp_path / "figures.json"
    show("title", [Comparison("fast", [1.0], [2.0], 1.0), Comparison("slow", [3.0], [2.0], 1.0)], str(file))
    shown = capsys.readouterr().out
    assert shown.count("too slow") == 1
    assert [one["ratio"] for one in json.loads(file.read_text())["comparisons"]] == [0.5, 1.5]
