"""Two networks of one bundle as one denoiser: the first for high noise levels, the second for low ones (Wan 2.2).

Shapes: B batch, C latent channels, T/H/W latent frames, height, width.
"""

from torch import Tensor

from megadit.infer.guidance import Denoiser
from megadit.models.conditioning import Conditioning


class PairDenoiser:
    """D(x; sigma) by the network that a noise level is for; all videos of a batch are at one."""

    def __init__(self, high: Denoiser, low: Denoiser, boundary: float) -> None:
        """`boundary` is the lowest sigma of `high`."""
        self.high, self.low, self.boundary = high, low, boundary

    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Clean latents x0, BCTHW, float32."""
        denoiser = self.high if sigma_B[0].item() >= self.boundary else self.low
        return denoiser(x_BCTHW, sigma_B, conditioning)
