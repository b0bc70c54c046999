"""Parameterizations: unit variance in, unit variance asked for, at every noise level; DDPM's steps."""

from typing import get_args

import pytest
import torch

from megadit.models.configs.config import DiTConfig, Parameterization
from megadit.models.diffusion.parameterization import (
    EDM,
    VP,
    EDMDenoiser,
    Flow,
    VPVelocity,
    ddpm_sigmas,
    parameterization_of,
)
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.networks.initialize import initialize_

SIGMAS = torch.logspace(-3, 2, 11, dtype=torch.float64)


@pytest.mark.parametrize("sigma_data", [0.5, 1.0])
def test_network_input_and_target_have_unit_variance(sigma_data):
    generator = torch.Generator().manual_seed(0)
    x0 = sigma_data * torch.randn(400_000, generator=generator, dtype=torch.float64)
    noise = torch.randn(400_000, generator=generator, dtype=torch.float64)
    for sigma in SIGMAS:
        c_skip, c_out, c_in, _ = EDM(sigma_data).scalings(sigma)
        x = x0 + sigma * noise
        target = (x0 - c_skip * x) / c_out
        # 400,000 draws: the standard deviation of a sample variance is 0.0022
        assert (c_in * x).var() == pytest.approx(1, abs=0.012)
        assert target.var() == pytest.approx(1, abs=0.012)


def test_the_loss_weight_undoes_the_output_scaling():
    edm = EDM(0.5)
    torch.testing.assert_close(edm.loss_weight(SIGMAS), edm.scalings(SIGMAS).c_out ** -2)


def test_noise_level_is_a_quarter_of_its_logarithm():
    torch.testing.assert_close(EDM(0.5).scalings(SIGMAS).c_noise, SIGMAS.log() / 4)


def test_a_fresh_network_denoises_by_shrinking():
    """adaLN-Zero starts with F = 0, so D = c_skip x: the best linear guess for unit Gaussian data."""
    config = DiTConfig(
        num_layers=1, hidden_size=24, num_attention_heads=2, in_channels=4, crossattn_emb_size=8, sigma_data=1.0
    )
    denoiser = EDMDenoiser(initialize_(DiT(config), seed=0))
    x = torch.randn(2, 4, 2, 4, 4)
    sigma = torch.tensor([0.1, 3.0])
    conditioning = Conditioning(torch.randn(2, 3, 8), torch.tensor([3, 0]), torch.tensor([8.0, 0.0]))
    expected = x / (1 + sigma**2).reshape(-1, 1, 1, 1, 1)
    torch.testing.assert_close(denoiser(x, sigma, conditioning), expected)


def test_vp_scalings_invert_the_schedule():
    """At DDPM's own levels t is whole; c_in x has DDPM's variance, and D(x) = x - sigma F."""
    sigma = ddpm_sigmas()[[0, 1, 400, 999]]
    found = VP().scalings(sigma)
    torch.testing.assert_close(found.c_noise, torch.tensor([0.0, 1, 400, 999], dtype=torch.float64))
    alpha_bar = (1 - torch.linspace(1e-4, 0.02, 1000).double()).cumprod(0)[[0, 1, 400, 999]]
    # the table is made in float32, as the published networks' was
    torch.testing.assert_close(found.c_in, alpha_bar.sqrt(), rtol=1e-4, atol=0)
    assert torch.equal(found.c_out, -sigma) and (found.c_skip == 1).all()
    beyond = VP().scalings(torch.tensor([1e-6, 1e6])).c_noise
    assert beyond.tolist() == [0, 999]
    between = VP().scalings((sigma[2] * ddpm_sigmas()[401]).sqrt()[None]).c_noise
    torch.testing.assert_close(between, torch.tensor([400.5], dtype=torch.float64))


def test_the_loss_weight_makes_errors_of_the_network_weigh_one():
    for parameterization in get_args(Parameterization):
        found = parameterization_of(DiTConfig(parameterization=parameterization))
        torch.testing.assert_close(found.loss_weight(SIGMAS), found.scalings(SIGMAS).c_out ** -2)


def test_every_preconditioner_of_the_config_has_its_parameterization():
    found = {
        name: parameterization_of(DiTConfig(parameterization=name, sigma_data=0.7))
        for name in get_args(Parameterization)
    }
    assert found == {"edm": EDM(0.7), "vp": VP(), "flow": Flow()}


def test_a_target_is_what_its_name_says():
    x0, noise = torch.randn(2, len(SIGMAS), dtype=torch.float64)
    for found in (EDM(0.5), VP(), VPVelocity()):
        c_skip, c_out, _, _ = found.scalings(SIGMAS)
        target = (x0 - c_skip * (x0 + SIGMAS * noise)) / c_out
        assert torch.allclose(target, noise, rtol=1e-6) == (found.target_name == "noise")


def test_a_velocity_is_that_of_ddpms_state():
    x0, noise = torch.randn(2, len(SIGMAS), dtype=torch.float64)
    a = 1 / (1 + SIGMAS**2).sqrt()
    c_skip, c_out, c_in, c_noise = VPVelocity("stable_diffusion").scalings(SIGMAS)
    torch.testing.assert_close((x0 - c_skip * (x0 + SIGMAS * noise)) / c_out, a * noise - SIGMAS * a * x0)
    assert torch.equal(c_in, a) and torch.equal(c_noise, VP("stable_diffusion").scalings(SIGMAS).c_noise)
    assert not torch.equal(c_noise, VP().scalings(SIGMAS).c_noise), "negative control: the steps are others"
    torch.testing.assert_close(VPVelocity().loss_weight(SIGMAS), c_out**-2)


def test_flow_in_sigma_is_flow_in_t():
    """The network sees (1 - t) x0 + t n at t, predicts n - x0, and a step of Euler in sigma is one in t."""
    x0, noise = torch.randn(2, len(SIGMAS), dtype=torch.float64)
    x, t = x0 + SIGMAS * noise, SIGMAS / (1 + SIGMAS)
    c_skip, c_out, c_in, c_noise = Flow().scalings(SIGMAS)
    torch.testing.assert_close(c_in * x, (1 - t) * x0 + t * noise)
    torch.testing.assert_close(c_noise, t)
    torch.testing.assert_close((x0 - c_skip * x) / c_out, noise - x0)

    F, after = torch.randn(len(SIGMAS), dtype=torch.float64), SIGMAS / 3
    D = c_skip * x + c_out * F
    stepped = x + (after - SIGMAS) * (x - D) / SIGMAS
    t_after = after / (1 + after)
    torch.testing.assert_close(stepped / (1 + after), c_in * x + (t_after - t) * F)


def test_vp_steps_are_whole_in_float32():
    """Which is what exported networks compute in; sinusoids of t turn a shift by 1e-3 into an error of 1e-3."""
    steps = VP().scalings(ddpm_sigmas().float()).c_noise
    assert steps.dtype == torch.float32
    torch.testing.assert_close(steps, torch.arange(1000.0), rtol=0, atol=1e-4)
    levels = torch.logspace(-3, 3, 500, dtype=torch.float64)
    torch.testing.assert_close(
        VP().scalings(levels.float()).c_noise.double(), VP().scalings(levels).c_noise, rtol=0, atol=1e-4
    )
