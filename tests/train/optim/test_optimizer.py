"""Muon against torch's, and learning-rate schedules against their formulas. Layouts are compared in test_parity."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megadit.train.optim import muon
from megadit.train.optim.muon import Muon, orthogonalize
from megadit.train.optim.optimizer import build_scheduler, fuse_updates, uses_muon
from megadit.train.optim.state import OwnedSlice
from megadit.train.recipes import load_recipe

from ...half_products import counted_half_products, without_half_products


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


def test_muon_is_torch_muon(monkeypatch):
    monkeypatch.setattr(muon, "computing_dtype", lambda device, dtype: dtype)
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


def test_muon_multiplies_what_the_processor_does(monkeypatch):
    """In float32 where bfloat16 would be emulated; the update is the same but for its rounding."""
    matrices = torch.randn(2, 24, 96, generator=torch.Generator().manual_seed(0))
    with without_half_products(), counted_half_products() as counted:
        exact = orthogonalize(matrices)
    assert exact.dtype == torch.float32 and not counted
    monkeypatch.setattr(muon, "computing_dtype", lambda device, dtype: dtype)
    with counted_half_products() as counted:
        rounded = orthogonalize(matrices)
    assert rounded.dtype == torch.bfloat16 and len(counted) == 3 * muon._STEPS
    assert (rounded.float() - exact).norm() < 0.05 * exact.norm()


def test_muon_takes_the_matrices_of_the_blocks():
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    assert uses_muon("module.dit.blocks.3.mlp.fc1.weight", matrix)
    assert not uses_muon("module.dit.blocks.3.self_attention.q_layernorm.weight", vector)
    assert not uses_muon("module.dit.x_embedder.weight", matrix)
    assert not uses_muon("module.uncertainty.linear.weight", matrix)


def owned_by_adamw(parameter, **options):
    optimizer = torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(2))]}, {"params": [parameter]}], **options)
    whole = {"name": "x", "parameter": parameter, "start": 0, "stop": parameter.numel()}
    return OwnedSlice(**whole, master=parameter.detach(), key=parameter, optimizer=optimizer), optimizer


@pytest.mark.parametrize("fused", [True, False])
def test_a_restored_step_is_where_the_kernel_reads_it(fused):
    """The meta device stands for a GPU, whose fused kernel would follow a pointer into the host's memory."""
    parameter = nn.Parameter(torch.zeros(4, 3, device="meta"))
    owned, optimizer = owned_by_adamw(parameter, fused=fused)
    owned.restore_state({"exp_avg": torch.ones(12), "exp_avg_sq": torch.ones(12)}, step=7)
    state = optimizer.state[parameter]
    assert state["step"].device.type == ("meta" if fused else "cpu")
    assert state["exp_avg"].device.type == "meta" and state["exp_avg"].shape == (4, 3)


def test_a_restored_state_goes_on_as_if_it_had_never_been_saved():
    torch.manual_seed(0)
    parameter, gradients = nn.Parameter(torch.randn(4, 3)), torch.randn(4, 4, 3)
    other = nn.Parameter(parameter.detach().clone())
    owned, optimizer = owned_by_adamw(parameter, fused=True)
    resumed, second = owned_by_adamw(other, fused=True)
    for turn, gradient in enumerate(gradients):
        if turn == 2:
            other.data.copy_(parameter.detach())
            resumed.restore_state({name: owned.state(name) for name in owned.state_names}, step=2)
        for one, of in ((parameter, optimizer), (other, second)):
            one.grad = gradient.clone()
            if one is parameter or turn >= 2:
                of.step()
    assert torch.equal(parameter, other)


def test_updates_of_a_gpu_are_fused_and_those_of_a_cpu_stay(monkeypatch):
    on_cpu, on_gpu = (torch.optim.AdamW([nn.Parameter(torch.zeros(3))]) for _ in range(2))
    fuse_updates(on_cpu)
    assert not on_cpu.param_groups[0]["fused"]
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    fuse_updates(on_gpu)
    assert on_gpu.param_groups[0]["fused"] and not on_gpu.param_groups[0]["foreach"]
    muon = torch.optim.SGD([nn.Parameter(torch.zeros(3))])
    fuse_updates(muon)
    assert not muon.param_groups[0]["fused"]
