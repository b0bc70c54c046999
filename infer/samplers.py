"""Solvers of the probability-flow ODE  dx/dsigma = (x - D(x; sigma)) / sigma  (arXiv 2206.00364, eqs. 1 and 3).

A sampler is a function of (denoise, x, sigmas): `x` holds the noise at sigmas[0] (BCTHW, or any shape whose first
axis is the batch), `sigmas` decreases and may end in 0. The state is float64, because a video is the small difference
of large noises; the network is asked, and answers, in float32.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megadit.models.support import UserError, nearest

Denoise = Callable[[Tensor, Tensor], Tensor]
"""(x [B, ...] float32, sigma_B float32) -> clean x0 of x's shape, with every condition already bound."""


Sampler = Callable[[Denoise, Tensor, Tensor], Tensor]
"""(denoise, x, sigmas) -> the state at sigmas[-1], float64; who watches or cancels wraps `denoise`."""


def euler(denoise: Denoise, x: Tensor, sigmas: Tensor) -> Tensor:
    """First order, one denoiser call a step: x_next = x + (sigma_next - sigma) d, d = (x - D(x; sigma)) / sigma."""
    x = x.double()
    for sigma, sigma_next in _steps(sigmas):
        x0 = _evaluate(denoise, x, sigma)
        x = x + (sigma_next - sigma) * (x - x0) / sigma
    return x


def heun(denoise: Denoise, x: Tensor, sigmas: Tensor) -> Tensor:
    """Second order, two denoiser calls a step and one on a last step to 0 (arXiv 2206.00364, algorithm 1)."""
    x = x.double()
    for sigma, sigma_next in _steps(sigmas):
        x0 = _evaluate(denoise, x, sigma)
        d = (x - x0) / sigma
        x_next = x + (sigma_next - sigma) * d
        if sigma_next > 0:
            # The correction is taken at the new point: at the old one it would be Euler, paid twice.
            d_next = (x_next - _evaluate(denoise, x_next, sigma_next)) / sigma_next
            x_next = x + (sigma_next - sigma) * (d + d_next) / 2
        x = x_next
    return x


def dpmpp_2m(denoise: Denoise, x: Tensor, sigmas: Tensor) -> Tensor:
    """DPM-Solver++(2M): second order, multistep, one denoiser call a step (arXiv 2211.01095, algorithm 2).

    With alpha = 1 and lambda = -ln sigma, h = lambda_next - lambda, r = h_previous / h:
    D_bar = (1 + 1 / (2 r)) D - 1 / (2 r) D_previous,  x_next = (sigma_next / sigma) x - (e^-h - 1) D_bar.
    e^-h is sigma_next / sigma, so that a step to 0 gives D_bar; that step and the first are of first order, D_bar = D.
    """
    x = x.double()
    h_previous = x0_previous = None
    for sigma, sigma_next in _steps(sigmas):
        x0 = x0_bar = _evaluate(denoise, x, sigma)
        if sigma_next > 0:
            h = math.log(sigma / sigma_next)
            if h_previous is not None:
                x0_bar = x0 + h / (2 * h_previous) * (x0 - x0_previous)
            h_previous, x0_previous = h, x0
        ratio = sigma_next / sigma
        x = ratio * x + (1 - ratio) * x0_bar
    return x


SAMPLERS: dict[str, Sampler] = {"euler": euler, "heun": heun, "dpmpp_2m": dpmpp_2m}


def find_sampler(name: str) -> str:
    """The key of `SAMPLERS` that `name` means, whatever its capitals.

    Raises:
        UserError: for an unknown name; lists those that exist.
    """
    key = name.lower()
    if key not in SAMPLERS:
        near = nearest(key, SAMPLERS)
        hint = f"; did you mean {near!r}?" if near else ""
        raise UserError(f"sampler {name!r} is not available; choose one of {', '.join(SAMPLERS)}{hint}")
    return key


def num_denoiser_calls(name: str, sigmas: Tensor) -> int:
    """How often the sampler of this name calls the denoiser on the way through `sigmas`."""
    num_steps = len(sigmas) - 1
    if name != "heun":
        return num_steps
    return 2 * num_steps - int(sigmas[-1] == 0)


def _steps(sigmas: Tensor) -> list[tuple[float, float]]:
    levels = sigmas.tolist()
    return list(zip(levels[:-1], levels[1:], strict=True))


def _evaluate(denoise: Denoise, x: Tensor, sigma: float) -> Tensor:
    sigma_B = torch.full((len(x),), sigma, dtype=torch.float32, device=x.device)
    return denoise(x.float(), sigma_B).double()
