"""Two networks of one bundle as one denoiser: the first for high noise levels, the second for low ones (Wan 2.2).

Shapes: B batch, C latent channels, T/H/W latent frames, height, width.
"""

from collections.abc import Sequence

from torch import Tensor

from megadit.infer.guidance import Denoiser
from megadit.models.conditioning import Conditioning


def as_one(denoisers: Sequence[Denoiser], boundary: float | None) -> Denoiser:
    """The denoiser of a bundle's networks: its one, or its two, of which `Bundle.boundary` parts the noise levels."""
    return denoisers[0] if boundary is None else PairDenoiser(*denoisers, boundary)


class PairDenoiser:
    """D(x; sigma) by the network that a noise level is for; all videos of a batch are at one."""

    def __init__(self, high: Denoiser, low: Denoiser, boundary: float) -> None:
        """`boundary` is the lowest sigma of `high`."""
        self.high, self.low, self.boundary = high, low, boundary

    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Clean latents x0, BCTHW, float32."""
        denoiser = self.high if sigma_B[0].item() >= self.boundary else self.low
        return denoiser(x_BCTHW, sigma_B, conditioning)
