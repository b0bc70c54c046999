"""Noise levels that a sampler steps through."""

import math

import torch
from torch import Tensor

from megadit.models.support import UserError


def karras_sigmas(num_steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> Tensor:
    """Noise levels from sigma_max down to sigma_min, then 0: float64 [num_steps + 1] on the CPU.

    sigma_i = (sigma_max^(1/rho) + i / (N - 1) (sigma_min^(1/rho) - sigma_max^(1/rho)))^rho for i < N, sigma_N = 0
    (arXiv 2206.00364, eq. 5). A single step goes from sigma_max straight to 0.

    Raises:
        UserError: unless num_steps is a whole number >= 1, 0 < sigma_min < sigma_max and rho > 0, all finite.
    """
    if num_steps != int(num_steps) or num_steps < 1:
        raise UserError(f"num_steps={num_steps} must be a whole number of at least 1")
    if not 0 < sigma_min < sigma_max < math.inf:
        raise UserError(f"need 0 < sigma_min < sigma_max, got sigma_min={sigma_min} and sigma_max={sigma_max}")
    if not 0 < rho < math.inf:
        raise UserError(f"rho={rho} must be greater than 0")
    start, end = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    fraction = torch.linspace(0, 1, int(num_steps), dtype=torch.float64)
    sigmas = (start + fraction * (end - start)) ** rho
    sigmas[0] = sigma_max  # raising to 1 / rho and back is not exact
    return torch.cat([sigmas, sigmas.new_zeros(1)])
