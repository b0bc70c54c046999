"""Solvers against closed forms: for these data the ideal denoiser and the ODE's solution are known."""

import math

import numpy as np
import pytest
import solver_errors
import torch
from solver_errors import GAUSSIAN, MIXTURE, SIGMA_MAX, SIGMA_MIN, initial_state

from megadit.infer.sampling import samplers
from megadit.infer.sampling.samplers import (
    SAMPLERS,
    Randomness,
    dpmpp_3m,
    euler,
    heun,
    num_denoiser_calls,
)
from megadit.infer.sampling.schedules import flow_sigmas, karras_sigmas
from megadit.models.diffusion.parameterization import Flow
from megadit.models.diffusion.settings import STOCHASTIC, find_sampler
from megadit.models.shared.errors import UserError

(MU,), (S,) = GAUSSIAN.means, GAUSSIAN.deviations
ORDERS = {"euler": 1, "heun": 2, "dpm2": 2, "dpmpp_2m": 2, "dpmpp_3m": 3, "res_2ab": 2, "unipc": 3, "unipc_bh2": 3}
ORDERS["consistency"] = 1


def ideal_denoiser(x, sigma_B):
    """E[x0 | x] = (s^2 x + sigma^2 mu) / (s^2 + sigma^2)."""
    variance = sigma_B.double().reshape(-1, *[1] * (x.ndim - 1)) ** 2
    return (S**2 * x.double() + variance * MU) / (S**2 + variance)


def exact_solution(x, sigma):
    """x(sigma) of the ODE that starts from x at SIGMA_MAX."""
    return MU + (x - MU) * math.sqrt((S**2 + sigma**2) / (S**2 + SIGMA_MAX**2))


def down_to_sigma_min(num_steps):
    return karras_sigmas(num_steps + 1, SIGMA_MIN, SIGMA_MAX)[:-1]


def order_of_convergence(sampler, denoiser, exact, num_steps=(32, 64, 128, 256)) -> float:
    """Slope of log error against log step size at sigma_min."""
    x = initial_state()
    errors = [(sampler(denoiser, x, down_to_sigma_min(n)) - exact).square().mean().sqrt().item() for n in num_steps]
    return -np.polyfit(np.log(num_steps), np.log(errors), 1)[0]


def gaussian_order(sampler) -> float:
    return order_of_convergence(sampler, ideal_denoiser, exact_solution(initial_state(), SIGMA_MIN))


def heun_at_the_old_point(denoise, x, sigmas):
    """The fault of NeMo's and DFM's sampler: the second stage asks at (x, sigma) again."""
    for sigma, sigma_next in zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True):
        sigma_B = torch.full((len(x),), sigma)
        d = (x - denoise(x.float(), sigma_B).double()) / sigma
        d_again = (x - denoise(x.float(), sigma_B).double()) / sigma
        x = x + (sigma_next - sigma) * (d + d_again) / 2
    return x


def dpmpp_3m_with_half_the_curvature(denoise, x, sigmas):
    """As diffusers and k-diffusion have it: the parabola's second derivative counts half."""

    def step(denoise, x, sigma, sigma_next, history):
        samplers._remember(denoise, x, sigma, history, length=3)
        x_next = samplers._exponential_step(x, sigma, sigma_next, history)
        if len(history) < 3:
            return x_next
        h = math.log(sigma / sigma_next)
        (t2, D2), (t1, D1), (t0, D0) = history
        second = ((D0 - D1) / (t0 - t1) - (D1 - D2) / (t1 - t2)) / (t0 - t2)
        moments = [-math.expm1(-h)]
        for k in (1, 2):
            moments.append(h**k - k * moments[-1])
        return x_next - second * moments[2] / 2

    return samplers._integrate(step, denoise, x, sigmas)


# 0.15: the slope of finitely many steps is not the limit. Measured on the Gaussian: 0.98 (Euler), 2.03 (Heun), 2.02
# (DPM2), 2.06 (2M), 3.07 (3M), 2.09 (RES), 3.05 (UniPC).
@pytest.mark.parametrize("name", SAMPLERS)
def test_order_of_convergence_on_gaussian_data(name):
    assert gaussian_order(SAMPLERS[name]) == pytest.approx(ORDERS[name], abs=0.15)


@pytest.mark.parametrize("name", SAMPLERS)
def test_order_of_convergence_on_a_mixture(name):
    """Where D is no longer linear in x, and bends where the components part."""
    exact = MIXTURE.solution(initial_state(), SIGMA_MIN)
    order = order_of_convergence(SAMPLERS[name], MIXTURE.denoise, exact, num_steps=(96, 192))
    assert order == pytest.approx(ORDERS[name], abs=0.25)


def denoiser_of_a_flow_network(x, sigma_B):
    """The ideal velocity v(x_t, t) = E[n - x0 | x_t] of these data, as a network gives it, in `Flow`'s scalings."""
    c_skip, c_out, c_in, t = Flow().scalings(sigma_B.double().reshape(-1, *[1] * (x.ndim - 1)))
    x_t = c_in * x.double()
    x0 = MU + (1 - t) * S**2 / ((1 - t) ** 2 * S**2 + t**2) * (x_t - (1 - t) * MU)
    return c_skip * x.double() + c_out * (x_t - x0) / t


def test_a_flow_network_is_the_same_denoiser():
    x, sigma_B = initial_state(), torch.tensor([0.05, 20.0], dtype=torch.float64)
    torch.testing.assert_close(denoiser_of_a_flow_network(x, sigma_B), ideal_denoiser(x, sigma_B))


@pytest.mark.parametrize("schedule", [karras_sigmas, flow_sigmas])
@pytest.mark.parametrize("denoiser", [ideal_denoiser, denoiser_of_a_flow_network])
def test_a_network_of_either_objective_samples_at_the_levels_of_either(denoiser, schedule):
    x = initial_state()
    sample = heun(denoiser, x, schedule(200, SIGMA_MIN, SIGMA_MAX))
    torch.testing.assert_close(sample, exact_solution(x, 0.0), rtol=0, atol=1e-3)


def test_the_mixtures_solution_solves_its_ode():
    x, sigma, step = initial_state(), 0.7, 1e-5
    slope = (MIXTURE.solution(x, sigma + step) - MIXTURE.solution(x, sigma - step)) / (2 * step)
    here = MIXTURE.solution(x, sigma)
    torch.testing.assert_close(slope, (here - MIXTURE.denoise(here, torch.tensor([sigma]))) / sigma, atol=1e-6, rtol=0)
    torch.testing.assert_close(GAUSSIAN.solution(x, sigma), exact_solution(x, sigma))


def test_the_table_of_errors(capsys):
    assert solver_errors.main([]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in SAMPLERS)


def test_heun_evaluated_at_the_old_point_is_euler():
    assert gaussian_order(heun_at_the_old_point) == pytest.approx(1, abs=0.1)
    x, sigmas = initial_state(), down_to_sigma_min(20)
    broken = heun_at_the_old_point(ideal_denoiser, x, sigmas)
    torch.testing.assert_close(broken, euler(ideal_denoiser, x, sigmas), rtol=1e-12, atol=1e-12)
    assert (broken - heun(ideal_denoiser, x, sigmas)).abs().max() > 1e-2


def test_half_of_the_parabolas_curvature_loses_the_third_order():
    assert gaussian_order(dpmpp_3m_with_half_the_curvature) < 2.2
    assert gaussian_order(dpmpp_3m) > 2.9


# The tolerances are twice the errors measured at 200 steps: 2e-2 at first order, 6e-4 and less above.
@pytest.mark.parametrize("name", SAMPLERS)
def test_sampling_to_zero_reaches_the_data(name):
    x = initial_state()
    sample = SAMPLERS[name](ideal_denoiser, x, karras_sigmas(200, SIGMA_MIN, SIGMA_MAX))
    assert sample.dtype == torch.float64
    torch.testing.assert_close(sample, exact_solution(x, 0.0), rtol=0, atol=5e-2 if ORDERS[name] == 1 else 1.5e-3)


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
    is_two_calls = name in ("heun", "dpm2")
    assert (
        len(calls) == num_denoiser_calls(name, sigmas) == (2 * num_steps - ends_in_zero if is_two_calls else num_steps)
    )
    between = (sigmas[:-1] * sigmas[1:]).sqrt()[:-1] if ends_in_zero else (sigmas[:-1] * sigmas[1:]).sqrt()
    asked = {
        "heun": sigmas[:-1] if ends_in_zero else sigmas,
        "dpm2": torch.cat([sigmas[:-1], between]).sort(descending=True).values,
    }.get(name, sigmas[:-1])
    assert sorted(set(calls), reverse=True) == pytest.approx(asked.float().tolist())


# --------------------------------------------------------------------------------------------------- randomness


def counted_noise(shape, seed=0):
    """(index) -> noise of its own; and the list of indices asked for."""
    used = []

    def noise(index):
        used.append(index)
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1000 * index))

    return noise, used


@pytest.mark.parametrize("settings", [{"churn": 20.0}, {"eta": 1.0}, {"eta": 0.5}])
@pytest.mark.parametrize("name", STOCHASTIC)
def test_noise_on_the_way_keeps_the_distribution(name, settings):
    """The SDE has the ODE's marginals: mean and deviation of the samples are those of the data."""
    generator = torch.Generator().manual_seed(1)
    x = SIGMA_MAX * torch.randn(4, 20_000, dtype=torch.float64, generator=generator)
    noise, used = counted_noise(x.shape)
    sigmas = karras_sigmas(60, SIGMA_MIN, SIGMA_MAX)
    sample = SAMPLERS[name](ideal_denoiser, x, sigmas, Randomness(noise=noise, **settings))
    assert sample.mean().item() == pytest.approx(MU, abs=0.01)
    # 80,000 samples have a standard error of 0.002; the rest is the solver's error at 60 steps, 0.06 at first order.
    assert sample.std().item() == pytest.approx(S, abs=0.07 if name == "euler" else 0.01)
    assert len(used) == len(set(used)) and len(used) in (59, 60)
    # Negative control: it is not the ODE's sample any more, and less alike the more noise there was.
    plain = SAMPLERS[name](ideal_denoiser, x, sigmas)
    assert torch.corrcoef(torch.stack([sample.flatten(), plain.flatten()]))[0, 1] < 0.9


def test_restarts_keep_the_distribution_of_what_was_distilled():
    """A network that answers with a sample, as a distilled one does, keeps its distribution at any list of levels; one
    that answers with the mean loses spread."""
    generator = torch.Generator().manual_seed(1)
    x = SIGMA_MAX * torch.randn(4, 20_000, dtype=torch.float64, generator=generator)
    noise, used = counted_noise(x.shape)
    sigmas = torch.tensor([SIGMA_MAX, 6.0, 2.0, 0.7, 0.0], dtype=torch.float64)

    def to_the_end(x, sigma_B):
        sigma = sigma_B[:, None].double()
        return MU + (x - MU) * S / (S**2 + sigma**2).sqrt()

    sample = SAMPLERS["consistency"](to_the_end, x, sigmas, Randomness(noise=noise))
    assert sample.mean().item() == pytest.approx(MU, abs=0.01) and sample.std().item() == pytest.approx(S, abs=0.01)
    assert used == [0, 1, 2], "none on the way to 0"
    assert SAMPLERS["consistency"](ideal_denoiser, x, sigmas, Randomness(noise=noise)).std().item() < 0.9 * S


def test_no_churn_and_no_eta_are_the_ode():
    noise, used = counted_noise(initial_state().shape)
    sigmas = karras_sigmas(10, SIGMA_MIN, SIGMA_MAX)
    still = Randomness(noise=noise)
    assert torch.equal(
        euler(ideal_denoiser, initial_state(), sigmas, still), euler(ideal_denoiser, initial_state(), sigmas)
    )
    outside = Randomness(noise=noise, churn=10.0, churn_interval=(200.0, 300.0))
    assert torch.equal(
        heun(ideal_denoiser, initial_state(), sigmas, outside), heun(ideal_denoiser, initial_state(), sigmas)
    )
    assert not used


def test_churn_acts_within_its_interval_and_at_most_by_the_square_root_of_two():
    asked = []

    def denoise(x, sigma_B):
        asked.append(sigma_B[0].item())
        return ideal_denoiser(x, sigma_B)

    noise, _ = counted_noise(initial_state().shape)
    sigmas = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    euler(denoise, initial_state(), sigmas, Randomness(noise=noise, churn=0.4, churn_interval=(2.0, 4.0)))
    assert asked == pytest.approx([8.0, 4.4, 2.2, 1.0])
    asked.clear()
    euler(denoise, initial_state(), sigmas, Randomness(noise=noise, churn=1000.0))
    assert asked == pytest.approx([8 * 2**0.5, 4 * 2**0.5, 2 * 2**0.5, 2**0.5])


def test_names():
    assert find_sampler("DPMPP_2M") == find_sampler("dpmpp-2m") == "dpmpp_2m"
    assert find_sampler("RES") == "res_2ab"
    with pytest.raises(UserError, match="'DDIM' is not available: euler takes the same steps"):
        find_sampler("DDIM")
    with pytest.raises(UserError, match="'plms' is not available: use a multistep sampler"):
        find_sampler("plms")
    with pytest.raises(UserError, match="'dim' is not available; choose one of euler, heun, dpm2, dpmpp_2m"):
        find_sampler("dim")
    with pytest.raises(UserError, match="did you mean 'euler'"):
        find_sampler("eular")
