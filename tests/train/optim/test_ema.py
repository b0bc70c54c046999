"""Power-function averages against their closed forms (arXiv 2312.02696, section 3.2 and appendix C)."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megadit.train.optim.ema import EmaWeights, decay, gamma_of
from megadit.train.optim.state import OwnedSlice, Ownership

ALONE = SimpleNamespace(data=SimpleNamespace(size=lambda: 1, rank=lambda: 0))


def averages_of(model, *sigma_rels):
    optimizer = torch.optim.AdamW(model.parameters())
    slices = tuple(
        OwnedSlice(name, parameter, 0, parameter.numel(), parameter.detach(), parameter, optimizer)
        for name, parameter in model.named_parameters()
    )
    ownership = Ownership(slices, is_replicated=True, state_names={}, groups=ALONE)
    return EmaWeights(sigma_rels, ownership)


def set_all(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


# the pairs that the paper names (section 3.2)
@pytest.mark.parametrize(("sigma_rel", "gamma"), [(0.05, 16.97), (0.10, 6.94)])
def test_gamma(sigma_rel, gamma):
    assert gamma_of(sigma_rel) == pytest.approx(gamma, abs=0.01)


@pytest.mark.parametrize("sigma_rel", [0.05, 0.1, 0.25])
def test_the_width_of_a_profile_is_sigma_rel(sigma_rel):
    steps = 2000
    weights, share = [], 1.0
    for step in range(steps, 0, -1):
        kept = decay(sigma_rel, step)
        weights.append((step / steps, share * (1 - kept)))
        share *= kept
    assert sum(weight for _, weight in weights) == pytest.approx(1)
    mean = sum(time * weight for time, weight in weights)
    width = math.sqrt(sum((time - mean) ** 2 * weight for time, weight in weights))
    assert width == pytest.approx(sigma_rel, rel=2e-3)  # discrete steps: of the order of 1 / steps


def test_the_average_of_weights_that_grow_steadily():
    model = nn.Linear(3, 2)
    ema_weights = averages_of(model, 0.1, 0.05)
    steps = 2000
    for step in range(1, steps + 1):
        set_all(model, step)
        ema_weights.update(step)
    for sigma_rel in (0.1, 0.05):
        gamma = gamma_of(sigma_rel)
        [(start, values)] = ema_weights.parts(sigma_rel, model.weight)
        assert start == 0 and values.shape == (6,) and values.dtype == torch.float32
        # the mean of t under a density proportional to t^gamma on [0, T]
        assert values[0].item() == pytest.approx((gamma + 1) / (gamma + 2) * steps, rel=1e-3)


def test_the_first_step_forgets_the_start():
    model = nn.Linear(3, 2)
    ema_weights = averages_of(model, 0.1)
    set_all(model, 5.0)
    ema_weights.update(1)
    assert torch.equal(ema_weights.parts(0.1, model.bias)[0][1], torch.full((2,), 5.0))


def test_swapping_gives_the_average_and_the_weights_back():
    model = nn.Linear(3, 2)
    ema_weights = averages_of(model, 0.1)
    for step in (1, 2, 3):
        set_all(model, float(step))
        ema_weights.update(step)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with ema_weights.swapped_in(0.1, model.parameters()):
        assert torch.equal(model.weight.flatten(), ema_weights.parts(0.1, model.weight)[0][1])
        assert not torch.equal(model.weight, before["weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with ema_weights.swapped_in(None, model.parameters()):
        assert torch.equal(model.weight, before["weight"])


def test_restoring():
    model = nn.Linear(3, 2)
    ema_weights = averages_of(model, 0.1)
    ema_weights.restore(0.1, model.weight, torch.arange(6.0).view(2, 3))
    assert torch.equal(ema_weights.parts(0.1, model.weight)[0][1], torch.arange(6.0))
