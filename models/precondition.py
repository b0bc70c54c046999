"""EDM preconditioning (Karras et al., arXiv 2206.00364, table 1, column "ours"). The only copy.

Shapes: B batch, C channels, T/H/W frames, height, width.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megadit.models.conditioning import Conditioning
from megadit.models.dit import DiT


class Scalings(NamedTuple):
    """The four functions of sigma that wrap a raw network F into a denoiser D, each of sigma's shape."""

    c_skip: Tensor
    c_out: Tensor
    c_in: Tensor
    c_noise: Tensor


def edm_scalings(sigma: Tensor, sigma_data: float) -> Scalings:
    """Table 1: the network's input c_in x and its target (x0 - c_skip x) / c_out have unit variance (appendix B.6)."""
    variance = sigma**2 + sigma_data**2
    return Scalings(
        c_skip=sigma_data**2 / variance,
        c_out=sigma * sigma_data / variance.sqrt(),
        c_in=1 / variance.sqrt(),
        c_noise=sigma.log() / 4,
    )


def edm_loss_weight(sigma: Tensor, sigma_data: float) -> Tensor:
    """lambda(sigma) = (sigma^2 + sigma_data^2) / (sigma sigma_data)^2 = 1 / c_out^2 (table 1)."""
    return (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2


class EDMDenoiser(nn.Module):
    """D(x; sigma) = c_skip x + c_out F(c_in x; c_noise) (eq. 7), in float32 whatever the network's precision."""

    def __init__(self, dit: DiT) -> None:
        super().__init__()
        self.dit = dit

    def forward(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Estimates the clean latents x0 (BCTHW, float32) in `x_BCTHW`, whose noise has standard deviation sigma."""
        x_BCTHW = x_BCTHW.float()
        sigma_B1111 = sigma_B.float().reshape(-1, 1, 1, 1, 1)
        c_skip, c_out, c_in, c_noise = edm_scalings(sigma_B1111, self.dit.config.sigma_data)
        dtype = self.dit.dtype
        F_BCTHW = self.dit((c_in * x_BCTHW).to(dtype), c_noise.flatten(), conditioning)
        return torch.addcmul(c_skip * x_BCTHW, c_out, F_BCTHW.float())
