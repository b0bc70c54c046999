import math
from dataclasses import replace

import pytest
import torch

from megadit.infer.sampling.resolve import resolve_settings
from megadit.infer.sampling.schedules import (
    SCHEDULES,
    explicit_sigmas,
    flow_sigmas,
    karras_sigmas,
    linear_sigmas,
    log_linear_sigmas,
    settings_sigmas,
)
from megadit.models.diffusion.parameterization import ddpm_sigmas
from megadit.models.diffusion.settings import SamplingSettings, find_schedule, resolution_shift
from megadit.models.shared.errors import UserError

DEFAULTS = SamplingSettings(num_steps=5, guidance=2.0, num_frames=5, height=16, width=24, fps=8)


def test_levels_follow_equation_5():
    sigmas = karras_sigmas(18, 0.002, 80.0, 7.0)
    assert sigmas.dtype == torch.float64 and sigmas.shape == (19,)
    expected = [(80 ** (1 / 7) + i / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7 for i in range(18)]
    torch.testing.assert_close(sigmas[:-1], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    assert sigmas[0] == 80 and sigmas[-1] == 0
    assert (sigmas.diff() < 0).all()


def test_rho_1_is_linear_and_large_rho_is_geometric():
    linear = karras_sigmas(5, 1.0, 9.0, 1.0)[:-1]
    torch.testing.assert_close(linear, torch.tensor([9.0, 7, 5, 3, 1], dtype=torch.float64))
    ratios = karras_sigmas(5, 0.01, 100.0, 1e5)[:-1].log().diff()
    torch.testing.assert_close(ratios, torch.full_like(ratios, -math.log(10)), rtol=1e-3, atol=0)


def test_one_step_goes_straight_to_zero():
    assert karras_sigmas(1, 0.002, 80.0, 7.0).tolist() == [80.0, 0.0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_steps": 0},
        {"num_steps": 10**9},
        {"num_steps": -3},
        {"num_steps": 2.5},
        {"sigma_min": 0.0},
        {"sigma_min": 80.0},
        {"sigma_max": math.inf},
        {"sigma_min": math.nan},
        {"rho": 0.0},
    ],
)
def test_bad_arguments_name_their_value(arguments):
    (name, value), *_ = arguments.items()
    with pytest.raises(UserError, match=f"{name}={value}"):
        karras_sigmas(**({"num_steps": 18} | arguments))


def test_ddpm_has_the_levels_of_its_steps():
    sigmas = SCHEDULES["ddpm"](10)
    assert torch.equal(sigmas[:-1], ddpm_sigmas()[[900, 800, 700, 600, 500, 400, 300, 200, 100, 0]]) and sigmas[-1] == 0
    assert sigmas[-2].item() == pytest.approx(0.01, rel=1e-3)  # beta_0 = 1e-4
    with pytest.raises(UserError, match="num_steps=1001 must be a whole number from 1 to 1000"):
        SCHEDULES["ddpm"](1001)


@pytest.mark.parametrize("name", sorted(SCHEDULES.keys() - {"ddpm", "stable_diffusion"}))
def test_every_schedule_starts_ends_and_decreases(name):
    sigmas = SCHEDULES[name](9, 0.01, 50.0)
    assert sigmas.dtype == torch.float64 and len(sigmas) == 10
    assert (sigmas[0], sigmas[-1]) == (50, 0)
    if name != "flow":  # it goes to 0 in even steps of t
        assert sigmas[-2].item() == pytest.approx(0.01)
    assert (sigmas.diff() < 0).all()
    assert SCHEDULES[name](1, 0.01, 50.0).tolist() == [50, 0]


def test_log_linear_and_linear_are_what_karras_is_between():
    linear, log_linear = linear_sigmas(5, 1.0, 9.0)[:-1], log_linear_sigmas(5, 0.01, 100.0)[:-1]
    torch.testing.assert_close(linear, karras_sigmas(5, 1.0, 9.0, 1.0)[:-1])
    torch.testing.assert_close(log_linear, torch.tensor([100.0, 10, 1, 0.1, 0.01], dtype=torch.float64))


def test_given_levels():
    assert explicit_sigmas([3, 1.5]).tolist() == explicit_sigmas([3, 1.5, 0]).tolist() == [3, 1.5, 0]
    for wrong in ([], [0], [1, 2], [1, 1], [3, -1], [math.inf, 1], [2, math.nan], [3, 0, 1]):
        with pytest.raises(UserError, match="sigmas="):
            explicit_sigmas(wrong)


def test_levels_of_settings():
    def levels(**given):
        return settings_sigmas(resolve_settings(DEFAULTS, **given)).tolist()

    assert levels() == karras_sigmas(5).tolist()
    assert levels(schedule="Log-Linear", num_steps=3, sigma_max=8.0) == log_linear_sigmas(3, 0.002, 8.0).tolist()
    assert levels(sigmas=[3, 1]) == [3, 1, 0]
    assert resolve_settings(DEFAULTS, sigmas=[3, 1]).num_steps == 2
    assert levels(sigmas=[3, 1], shift=2.0) == [6, 2, 0]


def test_the_shift_of_a_resolution():
    assert resolution_shift(64 * 64, 32 * 32) == 2
    assert resolve_settings(DEFAULTS, shift="auto").shift == 1
    assert resolve_settings(DEFAULTS, shift="auto", height=32, width=48).shift == 2
    assert resolve_settings(DEFAULTS, shift="auto", num_frames=20).shift == 1
    assert resolve_settings(DEFAULTS, shift="auto_video", num_frames=20, height=32, width=48).shift == 4
    # s sigma is the flow models' shift of t = sigma / (1 + sigma).
    t, s = 0.3, 3.0
    shifted = s * t / (1 - t)
    assert shifted / (1 + shifted) == pytest.approx(s * t / (1 + (s - 1) * t))


def test_names_of_schedules():
    assert find_schedule("Karras") == "karras" and find_schedule("log-linear") == "log_linear"
    with pytest.raises(UserError, match="'karas' is not available; did you mean 'karras'. choose one of karras,"):
        find_schedule("karas")


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_levels_are_even_in_t(shift):
    """As Wan and UniPC of diffusers step: t from 0.999 down, then shifted: s t / (1 + (s - 1) t)."""
    settings = replace(DEFAULTS, schedule="flow", sigma_max=999.0, num_steps=10, shift=shift)
    sigma = settings_sigmas(settings)
    even = torch.linspace(0.999, 0, 11, dtype=torch.float64)
    torch.testing.assert_close(sigma / (1 + sigma), shift * even / (1 + (shift - 1) * even))
    assert flow_sigmas(1, sigma_max=80.0).tolist() == [80.0, 0.0]
