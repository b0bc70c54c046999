"""The denoiser of a uniform batch, as sampling and export run it; that of a pack is `denoise_packed`.

Shapes: B batch, C channels, T/H/W latent frames, height, width.
"""

import torch
from torch import Tensor, nn

from megadit.models.diffusion.parameterization import parameterization_of
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.registry import SavedNetwork
from megadit.models.packing.dense_layout import DenseLayout


class EDMDenoiser(nn.Module):
    """D(x; sigma) = c_skip x + c_out F(c_in x; c_noise) (eq. 7), in float32 whatever the network's precision."""

    def __init__(self, dit: SavedNetwork) -> None:
        super().__init__()
        self.dit = dit
        self.parameterization = parameterization_of(dit.config)

    def forward(
        self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning, layout: DenseLayout | None = None
    ) -> Tensor:
        """Estimates the clean latents x0 (BCTHW, float32) in `x_BCTHW`, whose noise has standard deviation sigma.

        The network reads conditioning latents as `config.conditioning` says. Where they are in place of noisy latents,
        the estimate has no meaning. `layout`: see `DiT.forward`.
        """
        x_BCTHW, config = x_BCTHW.float(), self.dit.config
        sigma_B1111 = sigma_B.float().reshape(-1, 1, 1, 1, 1)
        c_skip, c_out, c_in, c_noise = self.parameterization.scalings(sigma_B1111)
        x_in, clean = c_in * x_BCTHW, conditioning.clean
        if clean is not None and config.conditioning.is_among:
            scaled_as = torch.full_like(sigma_B1111, config.conditioning_scaled_as)
            x_in = clean.among(x_in, self.parameterization.scalings(scaled_as).c_in)
            sigma_input = (
                torch.full_like(sigma_B1111, config.conditioning_sigma)
                if config.conditioning.has_own_level
                else sigma_B1111
            )
            c_noise = torch.cat([c_noise, self.parameterization.scalings(sigma_input).c_noise])
        F_BCTHW = self.dit(x_in.to(self.dit.dtype), c_noise.flatten(), conditioning, layout=layout)
        return torch.addcmul(c_skip * x_BCTHW, c_out, F_BCTHW[:, :, : x_BCTHW.shape[2]].float())
