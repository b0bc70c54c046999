"""The steps of DDPM (arXiv 2006.11239) as noise levels, and back."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megadit.models.configs.families import BetasName

DDPM_STEPS = 1000


class Betas(NamedTuple):
    """The variances of DDPM's steps: beta^(1 / power) rises linearly from that of the first to that of the last."""

    first: float
    last: float
    power: int


BETAS: dict[BetasName, Betas] = {
    "ddpm": Betas(1e-4, 0.02, power=1),  # arXiv 2006.11239, section 4
    "stable_diffusion": Betas(8.5e-4, 0.012, power=2),  # the code of arXiv 2112.10752; diffusers' "scaled_linear"
}


@cache
def ddpm_sigmas(betas: BetasName = "ddpm") -> Tensor:
    """sigma_t = sqrt((1 - abar_t) / abar_t) of DDPM's steps t = 0, 1, ..., with x_t scaled to variance-exploding form.

    float64 [DDPM_STEPS]; abar_t is the product of 1 - beta up to t (arXiv 2006.11239, eq. 4).
    """
    first, last, power = BETAS[betas]
    # as the published networks were trained: beta in float32, which shows in the last digits of sigma
    beta = torch.linspace(first ** (1 / power), last ** (1 / power), DDPM_STEPS, dtype=torch.float32) ** power
    alpha_bar = (1 - beta).cumprod(0).double()
    return ((1 - alpha_bar) / alpha_bar).sqrt()


def ddpm_step(sigma: Tensor, betas: BetasName = "ddpm") -> Tensor:
    """t(sigma), the inverse of `ddpm_sigmas`, for noise levels of any shape, in their precision.

    Linear in log sigma between two steps; clamped to the first and last step. Pass a tensor with a dimension: for a
    scalar, the host would wait for a GPU to index the table.
    """
    sigmas, log_ratios = _ddpm_steps(betas, sigma.dtype, sigma.device)
    within = sigma.clamp(sigmas[0], sigmas[-1])
    # the step below, found by comparisons: exporters have no searchsorted
    low = (sigmas < within[..., None]).sum(-1).clamp(1, DDPM_STEPS - 1) - 1
    # exact at every step in float32 too, as a difference of two logarithms is not
    t = low + torch.log1p((within - sigmas[low]) / sigmas[low]) / log_ratios[low]
    return t.to(sigma.dtype)


@cache
def _ddpm_steps(betas: BetasName, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """`ddpm_sigmas` in this precision, and the logarithm of the ratio of each to the next; copied to a device once."""
    sigmas = ddpm_sigmas(betas).to(dtype)
    return sigmas.to(device), sigmas.double().log().diff().to(device, dtype)
