"""Solvers against the closed form: for data ~ N(mu, s^2) the ideal denoiser and the ODE's solution are known."""

import math

import numpy as np
import pytest
import torch

from megadit.infer.samplers import SAMPLERS, dpmpp_2m, euler, find_sampler, heun, num_denoiser_calls
from megadit.infer.schedules import karras_sigmas
from megadit.models.support import UserError

MU, S = 0.3, 0.5
SIGMA_MIN, SIGMA_MAX = 0.002, 80.0


def ideal_denoiser(x, sigma_B):
    """E[x0 | x] = (s^2 x + sigma^2 mu) / (s^2 + sigma^2)."""
    variance = sigma_B.double().reshape(-1, *[1] * (x.ndim - 1)) ** 2
    return (S**2 * x.double() + variance * MU) / (S**2 + variance)


def exact_solution(x, sigma):
    """x(sigma) of the ODE that starts from x at SIGMA_MAX."""
    return MU + (x - MU) * math.sqrt((S**2 + sigma**2) / (S**2 + SIGMA_MAX**2))


def initial_state():
    generator = torch.Generator().manual_seed(0)
    return SIGMA_MAX * torch.randn(2, 3, 1, 4, 4, dtype=torch.float64, generator=generator)


def down_to_sigma_min(num_steps):
    return karras_sigmas(num_steps + 1, SIGMA_MIN, SIGMA_MAX)[:-1]


def order_of_convergence(sampler) -> float:
    """Slope of log error against log step size at sigma_min."""
    num_steps = np.array([32, 64, 128, 256])
    x = initial_state()
    errors = [
        (sampler(ideal_denoiser, x, down_to_sigma_min(int(n))) - exact_solution(x, SIGMA_MIN)).abs().max().item()
        for n in num_steps
    ]
    return -np.polyfit(np.log(num_steps), np.log(errors), 1)[0]


def heun_at_the_old_point(denoise, x, sigmas):
    """The fault of NeMo's and DFM's sampler: the second stage asks at (x, sigma) again."""
    for sigma, sigma_next in zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True):
        sigma_B = torch.full((len(x),), sigma)
        d = (x - denoise(x.float(), sigma_B).double()) / sigma
        d_again = (x - denoise(x.float(), sigma_B).double()) / sigma
        x = x + (sigma_next - sigma) * (d + d_again) / 2
    return x


@pytest.mark.parametrize(("sampler", "order"), [(euler, 1), (heun, 2), (dpmpp_2m, 2)])
def test_order_of_convergence(sampler, order):
    # 0.1: the slope of finitely many steps is not the limit; measured 0.98 (Euler), 2.03 (Heun), 2.06 (DPM-Solver++).
    assert order_of_convergence(sampler) == pytest.approx(order, abs=0.1)


def test_heun_evaluated_at_the_old_point_is_euler():
    assert order_of_convergence(heun_at_the_old_point) == pytest.approx(1, abs=0.1)
    x, sigmas = initial_state(), down_to_sigma_min(20)
    broken = heun_at_the_old_point(ideal_denoiser, x, sigmas)
    torch.testing.assert_close(broken, euler(ideal_denoiser, x, sigmas), rtol=1e-12, atol=1e-12)
    assert (broken - heun(ideal_denoiser, x, sigmas)).abs().max() > 1e-2


# The tolerances are twice the errors measured at 200 steps: 2e-2 at first order, 6e-4 at second.
@pytest.mark.parametrize(("sampler", "tolerance"), [(euler, 5e-2), (heun, 1.2e-3), (dpmpp_2m, 1.2e-3)])
def test_sampling_to_zero_reaches_the_data(sampler, tolerance):
    x = initial_state()
    sample = sampler(ideal_denoiser, x, karras_sigmas(200, SIGMA_MIN, SIGMA_MAX))
    assert sample.dtype == torch.float64
    torch.testing.assert_close(sample, exact_solution(x, 0.0), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", SAMPLERS)
def test_last_step_to_zero_returns_the_denoised(name):
    x = initial_state()
    sample = SAMPLERS[name](ideal_denoiser, x, torch.tensor([SIGMA_MAX, 0.0]))
    torch.testing.assert_close(sample, ideal_denoiser(x, torch.tensor([SIGMA_MAX] * 2)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ends_in_zero", [True, False])
@pytest.mark.parametrize("name", SAMPLERS)
def test_number_and_levels_of_calls(name, ends_in_zero):
    sigmas = karras_sigmas(7, SIGMA_MIN, SIGMA_MAX)
    sigmas = sigmas if ends_in_zero else sigmas[:-1]
    calls = []

    def denoise(x, sigma_B):
        assert x.dtype == sigma_B.dtype == torch.float32 and sigma_B.shape == (2,)
        calls.append(sigma_B[0].item())
        return ideal_denoiser(x, sigma_B)

    SAMPLERS[name](denoise, initial_state(), sigmas)
    num_steps = len(sigmas) - 1
    assert len(calls) == num_denoiser_calls(name, sigmas)
    assert len(calls) == (num_steps if name != "heun" else 2 * num_steps - ends_in_zero)
    asked = sigmas if name == "heun" and not ends_in_zero else sigmas[:-1]
    assert sorted(set(calls), reverse=True) == asked.float().tolist()


def test_names():
    assert find_sampler("DPMPP_2M") == "dpmpp_2m"
    with pytest.raises(UserError, match="'RES' is not available; choose one of euler, heun, dpmpp_2m"):
        find_sampler("RES")
    with pytest.raises(UserError, match="did you mean 'euler'"):
        find_sampler("eular")
