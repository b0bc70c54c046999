"""Muon against torch's, and learning-rate schedules against their formulas. Layouts are compared in test_parity."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megadit.train.muon import Muon, orthogonalize
from megadit.train.optimizer import build_scheduler, takes_muon
from megadit.train.recipes import load_recipe


def run_with(**changes):
    run = load_recipe("digits_tiny")
    optimizer = replace(run.optimizer, lr=2e-3, min_lr=2e-4, lr_warmup_iters=10, **changes)
    return replace(run, optimizer=optimizer, train=replace(run.train, train_iters=100))


def learning_rates(config, count=101):
    """The rate of step 1, 2, ..."""
    optimizer = SimpleNamespace(param_groups=[{"wd_mult": 1.0}, {"wd_mult": 0.0}])
    scheduler = build_scheduler(config, optimizer)
    rates = []
    for _ in range(count):
        scheduler.step(1)
        rates.append(optimizer.param_groups[0]["lr"])
    assert optimizer.param_groups[1]["weight_decay"] == 0
    return rates


FORMULAS = {
    "constant": lambda share: 2e-3,
    "linear": lambda share: 2e-3 + share * (2e-4 - 2e-3),
    "cosine": lambda share: 2e-4 + (2e-3 - 2e-4) * (1 + math.cos(math.pi * share)) / 2,
}


@pytest.mark.parametrize("style", FORMULAS)
def test_schedules(style):
    rates = learning_rates(run_with(lr_decay_style=style))
    for step, rate in enumerate(rates[:100], start=1):
        expected = 2e-3 * step / 10 if step <= 10 else FORMULAS[style]((step - 10) / 90)
        assert rate == pytest.approx(expected), step
    assert rates[100] == pytest.approx(FORMULAS[style](1.0))


def test_the_decay_may_end_before_the_run():
    rates = learning_rates(run_with(lr_decay_style="linear", lr_decay_iters=50))
    assert rates[49] == pytest.approx(2e-4) and rates[80] == pytest.approx(2e-4) and rates[30] > 3e-4


def test_muon_is_torch_muon():
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, 8), (12, 8), (8, 8), (8, 24)]
    ours = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    optimizers = (
        Muon([{"params": ours}], **settings),
        torch.optim.Muon(theirs, nesterov=True, adjust_lr_fn="match_rms_adamw", **settings),
    )
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        # both iterate in bfloat16, of 8 bits; the updates add up to about 3 x 0.05 x 0.2
        assert (one - other).abs().max() < 5e-4


def test_orthogonalised_matrices_have_singular_values_of_about_one():
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 20, 8), (2, 8, 20)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=generator)).float())
        assert values.min() > 0.5 and values.max() < 1.3


def test_muon_takes_the_matrices_of_the_blocks():
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    assert takes_muon("module.dit.blocks.3.mlp.fc1.weight", matrix)
    assert not takes_muon("module.dit.blocks.3.self_attention.q_layernorm.weight", vector)
    assert not takes_muon("module.dit.x_embedder.weight", matrix)
    assert not takes_muon("module.uncertainty.linear.weight", matrix)
