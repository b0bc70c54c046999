"""Solvers of the probability-flow ODE  dx/dsigma = (x - D(x; sigma)) / sigma  (arXiv 2206.00364, eqs. 1 and 3).

A sampler is a function of (denoise, x, sigmas): `x` holds the noise at sigmas[0] (BCTHW, or any shape whose first
axis is the batch), `sigmas` [steps + 1] decreases and may end in 0; x at sigmas[-1] is returned. The state is
float64, because a video is the small difference of large noises; the network computes in float32.

Over lambda = -ln sigma the ODE is linear except for D: d(x / sigma)/dlambda = D / sigma. The exponential solvers
integrate the linear part exactly, and replace D by a polynomial through the D of earlier calls:
x_next = e^-h x + integral_0^h e^-(h - t) D(t) dt,  h = lambda_next - lambda,  e^-h = sigma_next / sigma.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megadit.models.diffusion.noise import Stream, latent_noise
from megadit.models.diffusion.settings import SAMPLERS as TRAITS
from megadit.models.diffusion.settings import SamplingSettings

Denoise = Callable[[Tensor, Tensor], Tensor]
"""(x [B, ...] float32, sigma_B float32) -> clean x0 of x's shape, with every condition already bound. sigma_B is on the
CPU, so that branching on it never waits for the device of x."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Randomness:
    """Noise that a sampler adds between steps, which turns an ODE solver into an SDE solver."""

    noise: Callable[[int], Tensor]
    """(index) -> standard normal numbers of x's shape, float64; a new index for every use."""
    churn: float = 0.0
    """S_churn of arXiv 2206.00364, algorithm 2: noise added before steps, spread evenly over them."""
    churn_interval: tuple[float, ...] = ()
    """(S_tmin, S_tmax): the noise levels at which churn acts; empty: all."""
    eta: float = 0.0
    """0..1, amount of ancestral noise: a step goes below the next level, and noise is added back up to it. 1 is full
    ancestral sampling, 0 the ODE."""


def settings_randomness(
    settings: SamplingSettings, key_B: Tensor, shape: tuple[int, int, int, int]
) -> tuple[Randomness, ...]:
    """The noise that the settings ask a sampler to add, if any; it depends on each video's seed, not on its batch.

    `shape` is that of the latents, (C, T, H, W).
    """
    if not (settings.churn or settings.eta or TRAITS[settings.sampler].renews_noise):
        return ()
    return (
        Randomness(
            noise=lambda index: latent_noise(key_B, shape, stream=Stream.STEP + index).double(),
            churn=settings.churn,
            churn_interval=settings.churn_interval,
            eta=settings.eta,
        ),
    )


Sampler = Callable[[Denoise, Tensor, Tensor], Tensor]
"""(denoise, x, sigmas) -> the state at sigmas[-1], float64; callbacks wrap `denoise`."""
SAMPLERS: dict[str, Sampler] = {}
"""Name in `settings.SAMPLERS` -> its function."""


History = list[tuple[float, Tensor]]
"""(lambda, D) of the latest denoiser calls, oldest first."""
Step = Callable[[Denoise, Tensor, float, float, History], Tensor]
"""(denoise, x, sigma, sigma_next, history) -> x at sigma_next."""


def sampler(function: Sampler) -> Sampler:
    """Registers a sampler under the function's name, which has a row in `settings.SAMPLERS`."""
    assert function.__name__ in TRAITS, f"models/diffusion/settings.py has no row for {function.__name__}"
    SAMPLERS[function.__name__] = function
    return function


@sampler
def euler(denoise: Denoise, x: Tensor, sigmas: Tensor, randomness: Randomness | None = None) -> Tensor:
    """First order, one denoiser call a step: x_next = x + (sigma_next - sigma) d, d = (x - D(x; sigma)) / sigma."""

    def step(denoise: Denoise, x: Tensor, sigma: float, sigma_next: float, _: History) -> Tensor:
        d = (x - _evaluate(denoise, x, sigma)) / sigma
        return x + (sigma_next - sigma) * d

    return _integrate(step, denoise, x, sigmas, randomness)


@sampler
def heun(denoise: Denoise, x: Tensor, sigmas: Tensor, randomness: Randomness | None = None) -> Tensor:
    """Second order, two denoiser calls a step and one on a last step to 0 (arXiv 2206.00364, algorithms 1 and 2)."""

    def step(denoise: Denoise, x: Tensor, sigma: float, sigma_next: float, _: History) -> Tensor:
        d = (x - _evaluate(denoise, x, sigma)) / sigma
        x_next = x + (sigma_next - sigma) * d
        if sigma_next == 0:
            return x_next
        # The correction is taken at the new point: at the old one it would be Euler, paid twice.
        d_next = (x_next - _evaluate(denoise, x_next, sigma_next)) / sigma_next
        return x + (sigma_next - sigma) * (d + d_next) / 2

    return _integrate(step, denoise, x, sigmas, randomness)


@sampler
def dpm2(denoise: Denoise, x: Tensor, sigmas: Tensor, randomness: Randomness | None = None) -> Tensor:
    """DPM-Solver-2 (arXiv 2206.00927, algorithm 1): second order, the derivative taken halfway in ln sigma.

    Two denoiser calls a step and one on a last step to 0.
    """

    def step(denoise: Denoise, x: Tensor, sigma: float, sigma_next: float, _: History) -> Tensor:
        d = (x - _evaluate(denoise, x, sigma)) / sigma
        if sigma_next == 0:
            return x - sigma * d
        sigma_mid = math.sqrt(sigma * sigma_next)
        x_mid = x + (sigma_mid - sigma) * d
        d_mid = (x_mid - _evaluate(denoise, x_mid, sigma_mid)) / sigma_mid
        return x + (sigma_next - sigma) * d_mid

    return _integrate(step, denoise, x, sigmas, randomness)


@sampler
def dpmpp_2m(denoise: Denoise, x: Tensor, sigmas: Tensor) -> Tensor:
    """DPM-Solver++(2M): second order, multistep, one denoiser call a step (arXiv 2211.01095, algorithm 2).

    r = h_previous / h:  D_bar = (1 + 1 / (2 r)) D - 1 / (2 r) D_previous,  x_next = e^-h x + (1 - e^-h) D_bar.
    A step to 0 and the first are of first order, D_bar = D.
    """

    def step(denoise: Denoise, x: Tensor, sigma: float, sigma_next: float, history: History) -> Tensor:
        x0_bar = x0 = _remember(denoise, x, sigma, history, length=2)
        if sigma_next > 0 and len(history) == 2:
            (lambda_previous, x0_previous), (lambda_, _) = history
            r = (lambda_ - lambda_previous) / math.log(sigma / sigma_next)
            x0_bar = x0 + (x0 - x0_previous) / (2 * r)
        ratio = sigma_next / sigma
        return ratio * x + (1 - ratio) * x0_bar

    return _integrate(step, denoise, x, sigmas)


@sampler
def dpmpp_3m(denoise: Denoise, x: Tensor, sigmas: Tensor) -> Tensor:
    """DPM-Solver++(3M): third order, multistep, one denoiser call a step (arXiv 2211.01095, appendix B).

    The integral of a parabola through the last three D. Implementations that take half of the parabola's second
    derivative are of second order; tests/infer/sampling/test_samplers.py shows both.
    """
    return _integrate(_exponential_multistep(3), denoise, x, sigmas)


@sampler
def res_2ab(denoise: Denoise, x: Tensor, sigmas: Tensor) -> Tensor:
    """RES, "2ab": second order, one denoiser call a step: exponential Adams-Bashforth (arXiv 2308.02157).

    The integral of a line through the last two D; DPM-Solver++(2M) is the same but for an approximate integral.
    """
    return _integrate(_exponential_multistep(2), denoise, x, sigmas)


@sampler
def unipc(denoise: Denoise, x: Tensor, sigmas: Tensor) -> Tensor:
    """UniPC (arXiv 2302.04867) of order 2, corrected to 3: multistep, one denoiser call a step.

    The predictor is `res_2ab`. D at the predicted point is used twice: it continues the history, and it corrects the
    step that led there, by the integral of a parabola through D at both its ends and the one before.
    (These are UniPC's equations for the weights, solved exactly; its B(h) cancels.)
    """
    x, history = x.double(), History()
    sigma_previous = x_previous = None
    for sigma, sigma_next in _steps(sigmas):
        _remember(denoise, x, sigma, history, length=3)
        if x_previous is not None:
            x = _exponential_step(x_previous, sigma_previous, sigma, history)
        sigma_previous, x_previous = sigma, x
        x = _exponential_step(x, sigma, sigma_next, history[-2:])
    return x


@sampler
def unipc_bh2(denoise: Denoise, x: Tensor, sigmas: Tensor) -> Tensor:
    """UniPC of order 2 as in diffusers and Wan's own code: "bh2", one denoiser call a step.

    Equal to `unipc` except for two weights that they do not solve for: the slope in the predictor, and that of D in the
    first correction, are taken as one half. The last step is of first order.
    """
    x, history = x.double(), History()
    steps = _steps(sigmas)
    x_previous, sigma_previous = x, sigmas[0].item()
    for index, (sigma, sigma_next) in enumerate(steps):
        _remember(denoise, x, sigma, history, length=3)
        if index == 1:
            x = _second_order_step(x_previous, sigma_previous, sigma, history, at=0)
        elif index > 1:
            x = _exponential_step(x_previous, sigma_previous, sigma, history)
        sigma_previous, x_previous = sigma, x
        if index == 0 or index == len(steps) - 1:
            x = _exponential_step(x, sigma, sigma_next, history[-1:])
        else:
            x = _second_order_step(x, sigma, sigma_next, history[-2:], at=1)
    return x


@sampler
def consistency(denoise: Denoise, x: Tensor, sigmas: Tensor, randomness: Randomness | None = None) -> Tensor:
    """Multistep consistency sampling: x_next = D(x; sigma) + sigma_next noise, one call a step.

    For networks distilled to few levels (arXiv 2303.01469, algorithm 1). Without randomness the noise is the one in x,
    (x - D) / sigma, and the step is Euler's.
    """
    x = x.double()
    for index, (sigma, sigma_next) in enumerate(_steps(sigmas)):
        x0 = _evaluate(denoise, x, sigma)
        if sigma_next == 0:
            return x0
        noise = (x - x0) / sigma if randomness is None else randomness.noise(index)
        x = x0 + sigma_next * noise
    return x


def num_denoiser_calls(name: str, sigmas: Tensor) -> int:
    """Number of denoiser calls (NFE) of the sampler of this name over `sigmas`, [steps + 1]."""
    num_steps, calls = len(sigmas) - 1, TRAITS[name].calls
    return calls * num_steps - int(calls == 2 and sigmas[-1] == 0)


# ------------------------------------------------------------------------------------------------ integration


def _integrate(step: Step, denoise: Denoise, x: Tensor, sigmas: Tensor, randomness: Randomness | None = None) -> Tensor:
    """Takes `step` from level to level, with noise added before and after where there is randomness."""
    x, history = x.double(), History()
    for index, (sigma, sigma_next) in enumerate(_steps(sigmas)):
        if randomness is None:
            x = step(denoise, x, sigma, sigma_next, history)
            continue
        sigma_hat = sigma * (1 + _churn_gamma(randomness, sigma, len(sigmas) - 1))
        if sigma_hat > sigma:
            x = x + math.sqrt(sigma_hat**2 - sigma**2) * randomness.noise(2 * index)
        sigma_down, sigma_up = _ancestral_levels(sigma_hat, sigma_next, randomness.eta)
        x = step(denoise, x, sigma_hat, sigma_down, history)
        if sigma_up > 0:
            x = x + sigma_up * randomness.noise(2 * index + 1)
    return x


class NoisyStep(NamedTuple):
    """A step with noise of `euler`: from sigma to sigma_down by the denoiser, then sigma_up times the noise of an
    index."""

    noise_index: int
    sigma: float
    sigma_down: float
    sigma_up: float


def noisy_steps(sigmas: Tensor, eta: float) -> list[NoisyStep]:
    """The first steps over `sigmas` [steps + 1] with ancestral noise and without churn; a last one to 0 has none."""
    steps = [
        NoisyStep(2 * index + 1, sigma, *_ancestral_levels(sigma, sigma_next, eta))
        for index, (sigma, sigma_next) in enumerate(_steps(sigmas))
    ]
    return [step for step in steps if step.sigma_up > 0]


def _churn_gamma(randomness: Randomness, sigma: float, num_steps: int) -> float:
    """gamma_i of arXiv 2206.00364, algorithm 2: sigma_hat = (1 + gamma) sigma."""
    low, high = randomness.churn_interval or (0.0, math.inf)
    return min(randomness.churn / num_steps, math.sqrt(2) - 1) if low <= sigma <= high else 0.0


def _ancestral_levels(sigma: float, sigma_next: float, eta: float) -> tuple[float, float]:
    """(sigma_down, sigma_up) with sigma_down^2 + sigma_up^2 = sigma_next^2; eta = 1 is ancestral sampling.

    sigma_up = eta sigma_next sqrt(1 - r^2), r = sigma_next / sigma (the posterior's, arXiv 2006.11239, eq. 7).
    """
    r = sigma_next / sigma
    return sigma_next * math.sqrt(1 - eta**2 + (eta * r) ** 2), eta * sigma_next * math.sqrt(1 - r**2)


def _exponential_multistep(order: int) -> Step:
    def step(denoise: Denoise, x: Tensor, sigma: float, sigma_next: float, history: History) -> Tensor:
        _remember(denoise, x, sigma, history, length=order)
        return _exponential_step(x, sigma, sigma_next, history)

    return step


def _exponential_step(x: Tensor, sigma: float, sigma_next: float, history: History) -> Tensor:
    """x_next = e^-h x + integral_0^h e^-(h - t) D(t) dt, D the polynomial through `history`.

    A step to 0 gives D at its start, the polynomial of order 0: a higher order would diverge.
    """
    if sigma_next == 0:
        return history[-1][1]
    h = math.log(sigma / sigma_next)
    times = [lambda_ + math.log(sigma) for lambda_, _ in history]
    weights = _integral_weights(h, times)
    return math.exp(-h) * x + sum(weight * x0 for weight, (_, x0) in zip(weights, history, strict=True))


def _second_order_step(x: Tensor, sigma: float, sigma_next: float, history: History, *, at: int) -> Tensor:
    """x_next = e^-h x + (1 - e^-h) (D + h D' / 2), D that of history[at], D' the slope through both of its two."""
    if sigma_next == 0:
        return history[-1][1]
    h = math.log(sigma / sigma_next)
    (lambda_0, D_0), (lambda_1, D_1) = history
    D_bar = history[at][1] + h / 2 * (D_1 - D_0) / (lambda_1 - lambda_0)
    return math.exp(-h) * x - math.expm1(-h) * D_bar


def _integral_weights(h: float, times: list[float]) -> list[float]:
    """w with sum_j w_j p(times_j) = integral_0^h e^-(h - t) p(t) dt for every polynomial p of degree < len(times).

    The moments m_k = integral_0^h e^-(h - t) t^k dt are m_0 = 1 - e^-h, m_k = h^k - k m_{k-1}.
    """
    moments = [-math.expm1(-h)]
    for k in range(1, len(times)):
        moments.append(h**k - k * moments[-1])
    powers = torch.tensor(times, dtype=torch.float64) ** torch.arange(len(times))[:, None]
    return torch.linalg.solve(powers, torch.tensor(moments, dtype=torch.float64)).tolist()


def _steps(sigmas: Tensor) -> list[tuple[float, float]]:
    levels = sigmas.tolist()
    return list(zip(levels[:-1], levels[1:], strict=True))


def _evaluate(denoise: Denoise, x: Tensor, sigma: float) -> Tensor:
    sigma_B = torch.full((len(x),), sigma, dtype=torch.float32)
    return denoise(x.float(), sigma_B).double()


def _remember(denoise: Denoise, x: Tensor, sigma: float, history: History, *, length: int) -> Tensor:
    """D(x; sigma), which joins the history; this keeps the latest `length`."""
    x0 = _evaluate(denoise, x, sigma)
    history.append((-math.log(sigma), x0))
    del history[:-length]
    return x0
