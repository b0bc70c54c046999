"""High-noise and low-noise experts of a bundle as one denoiser (Wan 2.2).

Shapes: B batch, C latent channels, T/H/W latent frames, height, width.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megadit.infer.sampling.guidance import Denoiser
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.networks.conditioning import Conditioning


def as_one(denoisers: Sequence[Denoiser], boundary: float | None) -> Denoiser:
    """Denoiser of a bundle's networks: one, or two experts for noise levels above and below `Bundle.boundary`."""
    return denoisers[0] if boundary is None else ExpertDenoiser(*denoisers, boundary)


def experts_of(denoiser: Denoiser) -> tuple[Denoiser, ...]:
    """The denoisers of its networks: one, or two experts."""
    return (denoiser.high, denoiser.low) if isinstance(denoiser, ExpertDenoiser) else (denoiser,)


class ExpertDenoiser:
    """D(x; sigma) by the expert of the noise level, which all videos of a batch share."""

    def __init__(self, high: Denoiser, low: Denoiser, boundary: float) -> None:
        """`boundary` is the lowest sigma of `high`."""
        self.high, self.low, self.boundary = high, low, boundary
        self._attached: dict[str, tuple[Denoiser, ...]] = {}
        """Adapter's name -> the denoisers whose networks have it."""

    @property
    def dtype(self) -> torch.dtype:
        return self.high.dtype

    def load_adapter(
        self, name: str, state: Mapping[str, Tensor], adapter: AdapterConfig, *, expert: str | None = None
    ) -> None:
        """Attach an adapter to `expert` ("high" or "low"), or to both.

        Raises:
            UserError: for one that does not fit the networks.
        """
        if self.high is self.low:  # each rank has both, and chooses between them as this does
            self._attached[name] = (self.high,)
            self.high.load_adapter(name, state, adapter, expert=expert)
            return
        self._attached[name] = {"high": (self.high,), "low": (self.low,)}.get(expert, (self.high, self.low))
        for denoiser in self._attached[name]:
            denoiser.load_adapter(name, state, adapter)

    def remove_adapter(self, name: str) -> None:
        """Detach an adapter."""
        for denoiser in self._attached.pop(name):
            denoiser.remove_adapter(name)

    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Clean latents x0, BCTHW, float32."""
        denoiser = self.high if sigma_B[0].item() >= self.boundary else self.low
        return denoiser(x_BCTHW, sigma_B, conditioning)
