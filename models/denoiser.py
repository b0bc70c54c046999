"""The denoiser of a uniform batch, as sampling and export run it; that of a pack is `denoise_packed`.

Shapes: B batch, C channels, T/H/W latent frames, height, width.
"""

import torch
from torch import Tensor, nn

from megadit.models.conditioning import Conditioning
from megadit.models.dit import DiT
from megadit.models.layout import DenseLayout
from megadit.models.parameterization import parameterization_of


class EDMDenoiser(nn.Module):
    """D(x; sigma) = c_skip x + c_out F(c_in x; c_noise) (eq. 7), in float32 whatever the network's precision."""

    def __init__(self, dit: DiT) -> None:
        super().__init__()
        self.dit = dit
        self.parameterization = parameterization_of(dit.config)

    def forward(
        self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning, layout: DenseLayout | None = None
    ) -> Tensor:
        """Estimates the clean latents x0 (BCTHW, float32) in `x_BCTHW`, whose noise has standard deviation sigma.

        `layout`: see `DiT.forward`.
        """
        x_BCTHW = x_BCTHW.float()
        sigma_B1111 = sigma_B.float().reshape(-1, 1, 1, 1, 1)
        c_skip, c_out, c_in, c_noise = self.parameterization.scalings(sigma_B1111)
        dtype = self.dit.dtype
        F_BCTHW = self.dit((c_in * x_BCTHW).to(dtype), c_noise.flatten(), conditioning, layout=layout)
        return torch.addcmul(c_skip * x_BCTHW, c_out, F_BCTHW.float())
