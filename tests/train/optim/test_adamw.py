"""AdamW with bfloat16 moments against torch's with float32 ones."""

import pytest
import torch
from torch import nn

from megadit.train.optim import adamw
from megadit.train.optim.adamw import HalfMomentAdamW, round_at_random

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def train(build, steps=200):
    """Weights and second moments after steps with gradients of a steady scale, which then falls to a tenth."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(64, 48, generator=generator))
    optimizer = build([{"params": [parameter]}], **SETTINGS)
    for step in range(steps):
        scale = 1.0 if step < steps // 2 else 0.1
        parameter.grad = scale * torch.randn(64, 48, generator=generator)
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]["exp_avg_sq"].float()


def test_weights_and_moments_are_those_of_torch():
    (ours, our_squares), (theirs, their_squares) = train(HalfMomentAdamW), train(torch.optim.AdamW)
    # 200 steps of about 0.01: the paths are long beside their difference, rounding of 2^-9 a moment and step
    assert (ours - theirs).norm() < 0.02 * theirs.norm()
    # a random walk of steps of up to 2^-8 that forgets one in a thousand; its mean is exact
    assert (our_squares / their_squares).mean().item() == pytest.approx(1, abs=0.01)


def test_rounding_to_the_nearest_would_stand_still(monkeypatch):
    """The control: without chance the second moments do not follow."""
    monkeypatch.setattr(adamw, "round_at_random", lambda x, bits: x.bfloat16())
    _, our_squares = train(HalfMomentAdamW)
    _, their_squares = train(torch.optim.AdamW)
    assert abs((our_squares / their_squares).mean().item() - 1) > 0.05


def test_rounding_is_right_on_average_and_exact_where_it_can_be():
    x = torch.full((1 << 16,), 1 + 2**-9)  # a quarter of the way from 1 to the next number, 1 + 2^-7
    bits = torch.arange(1 << 16, dtype=torch.int32)
    rounded = round_at_random(x, bits).float()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert rounded.mean().item() == pytest.approx(1 + 2**-9, abs=1e-7)
    exact = torch.tensor([0.0, -0.0, 1.5, -2.0, float("inf"), -float("inf")])
    assert torch.equal(round_at_random(exact, torch.full((6,), 0xFFFF, dtype=torch.int32)).float(), exact)
    assert round_at_random(torch.tensor([float("nan")]), bits[-1:]).isnan().all()


def test_bits_are_uniform_and_differ_from_step_to_step():
    position = torch.arange(1 << 14, dtype=torch.int32)
    first, second = (adamw._hash(position, torch.tensor(seed, dtype=torch.int32)) for seed in (7919, 15838))
    for bits in (first & 0xFFFF, (first >> 16) & 0xFFFF):
        share = torch.histc(bits.float(), 16, 0, 1 << 16) / len(position)
        assert (share - 1 / 16).abs().max() < 0.01  # four standard deviations: 4 sqrt(1/16 / 2^14)
    assert (first == second).float().mean() < 0.001
    assert abs(torch.corrcoef(torch.stack([first.float(), second.float()]))[0, 1]) < 0.04


def test_the_same_step_gives_the_same_moments():
    for one, other in zip(train(HalfMomentAdamW, steps=5), train(HalfMomentAdamW, steps=5), strict=True):
        assert torch.equal(one, other)
