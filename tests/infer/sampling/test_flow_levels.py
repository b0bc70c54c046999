"""Noise levels of other programs: their schedulers step through the same ones, and tell a network the same t."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megadit.infer.sampling.samplers import SAMPLERS
from megadit.infer.sampling.schedules import (
    FLOW_LEVELS,
    flow_level_sigmas,
    highest_sigma,
    noise_of_start,
    settings_sigmas,
    with_whole_steps,
)
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.errors import UserError

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

FLOW = SimpleNamespace(parameterization="flow")
STEPS, SHIFTS = (1, 2, 3, 4, 9, 27, 30), (1.0, 3.0, 8.0)
WEIGHTS = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)) / 2


def velocity(x, step):
    """A network of a state and of one of 1000 steps, which it hears well."""
    return torch.tanh(x @ WEIGHTS) * 1.5 + torch.sin(step / 7) * 0.3 * x


def denoise(x, sigma_B):
    t = (sigma_B / (1 + sigma_B)).double()[:, None]
    state = x / (1 + sigma_B[:, None])
    return state - t * velocity(state, (1000 * t).float())


def settings_of(schedule, num_steps, shift):
    size = {"num_frames": 1, "height": 8, "width": 8, "fps": 0.0}
    return SamplingSettings(schedule=schedule, num_steps=num_steps, shift=shift, guidance=1.0, **size)


def ours(settings, noise, sampler):
    sigmas = settings_sigmas(settings)
    start = noise.double() * sigmas[0] * noise_of_start(settings, sigmas)
    return SAMPLERS[sampler](with_whole_steps(denoise, settings, FLOW), start, sigmas).float()


def stepped(scheduler, noise):
    for step in scheduler.timesteps:
        noise = scheduler.step(velocity(noise, step.float()), step, noise).prev_sample
    return noise


def unipc(num_steps, shift, levels=None):
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )
    scheduler.set_timesteps(num_steps, sigmas=levels)
    return scheduler


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("num_steps", STEPS)
def test_schedules_equal_other_programs(num_steps, shift):
    """To 1e-5; theirs are float32."""
    noise = torch.randn(2, 6, generator=torch.Generator().manual_seed(num_steps))
    of_euler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    of_euler.set_timesteps(num_steps)
    # Wan's own scheduler is an earlier state of diffusers': levels evenly from a float32 .999 to 0
    of_wan = unipc(num_steps, shift, np.linspace(np.float32(0.999), 0, num_steps + 1)[:-1])
    for schedule, sampler, theirs in (
        ("wan_diffusers", "unipc_bh2", unipc(num_steps, shift)),
        ("flow_match_euler", "euler", of_euler),
        ("wan", "unipc_bh2", of_wan),
    ):
        settings = settings_of(schedule, num_steps, shift)
        assert distance(ours(settings, noise, sampler), stepped(theirs, noise)) <= 1e-5, schedule


def test_what_makes_them_equal_matters():
    noise, settings = torch.randn(2, 6), settings_of("wan_diffusers", 9, 3.0)
    expected = stepped(unipc(9, 3.0), noise)
    assert distance(ours(settings, noise, "unipc"), expected) > 1e-4, "the weights of the solver"
    exact = SAMPLERS["unipc_bh2"](denoise, noise.double() * settings_sigmas(settings)[0], settings_sigmas(settings))
    assert distance(exact.float(), expected) > 1e-4, "whole steps"
    assert distance(ours(settings_of("flow", 9, 3.0), noise, "unipc_bh2"), expected) > 1e-4, "the levels"


@pytest.mark.parametrize("schedule", FLOW_LEVELS)
def test_levels_decrease_to_zero(schedule):
    for num_steps in (1, 50, 999, 1000):
        sigmas = settings_sigmas(settings_of(schedule, num_steps, 5.0))
        assert sigmas.shape == (num_steps + 1,) and (sigmas.diff() < 0).all() and sigmas[-1] == 0
    assert highest_sigma(settings_of(schedule, 8, 5.0)) <= 999 * 5.0 * (1 + 1e-6)
    with pytest.raises(UserError, match=r"shift=1e\+12 makes some of the 8 levels equal"):
        flow_level_sigmas(settings_of(schedule, 8, 1e12))


def test_a_network_that_is_no_flow_is_told_its_noise():
    settings = settings_of("wan", 4, 1.0)
    assert with_whole_steps(denoise, settings, SimpleNamespace(parameterization="edm")) is denoise
    assert with_whole_steps(denoise, settings_of("flow", 4, 1.0), FLOW) is denoise
    told = []
    asked = with_whole_steps(lambda x, sigma_B: told.append(sigma_B.item()) or x, settings, FLOW)
    for t in (0.7777, 2e-4):  # levels between those of the schedule, as solvers of two calls have
        asked(torch.ones(1, 1), torch.tensor([t / (1 - t)]))
    assert told[0] == pytest.approx(0.777 / 0.223, rel=1e-5) and 0 < told[1] < 2e-4
