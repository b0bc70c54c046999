"""Parameterizations, the target that a network predicts at a noise level, and the denoisers built on them: of a uniform
batch, as sampling and export run it, and of a pack.

Shapes: B batch, C channels, T/H/W latent frames, height, width, S video tokens, P patch dim, L text tokens, E text
feature width, G segments of a pack, R modulation rows.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megadit.models.configs.families import BetasName
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.registry import SavedNetwork
from megadit.models.packing.dense_layout import DenseLayout
from megadit.models.packing.pack_layout import PackLayout


class Scalings(NamedTuple):
    """The four functions of sigma that wrap a raw network F into a denoiser D, each of sigma's shape."""

    c_skip: Tensor
    c_out: Tensor
    c_in: Tensor
    c_noise: Tensor


class Parameterization(Protocol):
    """D(x; sigma) = c_skip x + c_out F(c_in x; c_noise) (arXiv 2206.00364, eq. 7), and how F is trained."""

    target_name: str
    """Name of the target that F predicts."""

    def scalings(self, sigma: Tensor) -> Scalings:
        """Computes the scalings of noise levels of any shape, in their precision."""

    def loss_weight(self, sigma: Tensor) -> Tensor:
        """lambda(sigma), the factor of |D - x0|^2 in the loss, shaped like sigma (any shape)."""


@dataclass(frozen=True, slots=True)
class EDM:
    """Karras et al., arXiv 2206.00364, table 1, column "ours": input and target of F have unit variance."""

    sigma_data: float
    """Standard deviation of the latents."""
    target_name = "a mixture of x0 and noise"

    def scalings(self, sigma: Tensor) -> Scalings:
        """Scalings of equation 7, for noise levels of any shape."""
        variance = sigma**2 + self.sigma_data**2
        return Scalings(
            c_skip=self.sigma_data**2 / variance,
            c_out=sigma * self.sigma_data / variance.sqrt(),
            c_in=1 / variance.sqrt(),
            c_noise=sigma.log() / 4,
        )

    def loss_weight(self, sigma: Tensor) -> Tensor:
        """lambda(sigma) = (sigma^2 + sigma_data^2) / (sigma sigma_data)^2 = 1 / c_out^2, shaped like sigma."""
        return (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2


@dataclass(frozen=True, slots=True)
class VP:
    """D = x - sigma F(x / sqrt(1 + sigma^2); t(sigma)) (arXiv 2206.00364, table 1, column "VP"), with DDPM's steps t.

    t(sigma) is `ddpm_step`.
    """

    betas: BetasName = "ddpm"
    target_name = "noise"

    def scalings(self, sigma: Tensor) -> Scalings:
        """Scalings of the nearest DDPM timesteps, for noise levels of any shape."""
        return Scalings(
            c_skip=torch.ones_like(sigma),
            c_out=-sigma,
            c_in=1 / (1 + sigma**2).sqrt(),
            c_noise=ddpm_step(sigma, self.betas),
        )

    def loss_weight(self, sigma: Tensor) -> Tensor:
        """lambda(sigma) = 1 / sigma^2 = 1 / c_out^2, shaped like sigma: DDPM's L_simple (arXiv 2006.11239, eq. 14)."""
        return 1 / sigma**2


@dataclass(frozen=True, slots=True)
class VPVelocity:
    """F predicts the velocity v = a n - s x0 of DDPM's state a x0 + s n, a = 1 / sqrt(1 + sigma^2), s = sigma a
    (arXiv 2202.00512, section 4), so that D = a (a x) - s F(a x; t(sigma)), with the steps t of `VP`."""

    betas: BetasName = "ddpm"
    target_name = "velocity"

    def scalings(self, sigma: Tensor) -> Scalings:
        """Scalings of the nearest DDPM timesteps, for noise levels of any shape."""
        a = 1 / (1 + sigma**2).sqrt()
        return Scalings(c_skip=a**2, c_out=-sigma * a, c_in=a, c_noise=ddpm_step(sigma, self.betas))

    def loss_weight(self, sigma: Tensor) -> Tensor:
        """lambda(sigma) = 1 + 1 / sigma^2 = 1 / c_out^2, shaped like sigma: |F - v|^2 counts once."""
        return 1 + 1 / sigma**2


@dataclass(frozen=True, slots=True)
class Flow:
    """Rectified flow (arXiv 2209.03003; 2403.03206, section 2): F predicts the velocity n - x0 of (1 - t) x0 + t n.

    With t = sigma / (1 + sigma) that state is x / (1 + sigma), and Euler's step in t is Euler's step in sigma: every
    solver, schedule and cache takes such a network. A logit-normal t is a log-normal sigma; a shift multiplies sigma.
    """

    target_name = "noise minus x0"

    def scalings(self, sigma: Tensor) -> Scalings:
        """Scalings for noise levels of any shape; c_noise is t, from 0 to 1."""
        return Scalings(
            c_skip=1 / (1 + sigma), c_out=-sigma / (1 + sigma), c_in=1 / (1 + sigma), c_noise=sigma / (1 + sigma)
        )

    def loss_weight(self, sigma: Tensor) -> Tensor:
        """lambda(sigma) = ((1 + sigma) / sigma)^2 = 1 / c_out^2, shaped like sigma: |F - (n - x0)|^2 counts once."""
        return ((1 + sigma) / sigma) ** 2


def parameterization_of(config: NetworkConfig) -> Parameterization:
    """The parameterization that `config.parameterization` names."""
    return {
        "edm": EDM(config.sigma_data),
        "vp": VP(config.betas),
        "vp_velocity": VPVelocity(config.betas),
        "flow": Flow(),
    }[config.parameterization]


class PackedNetwork(Protocol):
    """A network F of packs: `DiT`, or a model chunk of one (`part`: `dit.Chunk`)."""

    config: NetworkConfig
    dtype: torch.dtype
    part: Any

    def forward_packed(
        self, tokens_S1P: Tensor, c_noise_R: Tensor, text_L1E: Tensor, fps_G: Tensor, layout: PackLayout, **more: Any
    ) -> Tensor:
        """F, [S, 1, P]; see `DiT.forward_packed`."""


def denoise_packed(
    dit: PackedNetwork,
    x_S1P: Tensor,
    sigma_G: Tensor,
    text_L1E: Tensor,
    fps_G: Tensor,
    layout: PackLayout,
    before: Tensor | None = None,
    **more: Tensor | int | None,
) -> Tensor:
    """D(x; sigma), float32 [S, 1, P] (eq. 7), for the samples of a pack with noise added; row g belongs to segment g.

    `config.conditioning` says how conditioning tokens are read. For `before`, [S, 1, D], and `more` see
    `DiT.forward_packed`.
    """
    config, tensors, scalings = dit.config, layout.on(sigma_G.device), parameterization_of(dit.config).scalings
    sigma_R = sigma_G
    if layout.has_conditioning:
        sigma_R = sigma_G[tensors.segment_of_row_R]
        if config.conditioning.has_own_level:
            sigma_R[len(sigma_G) :].fill_(config.conditioning_sigma or 0.0)
    *of_rows, c_noise_R = scalings(sigma_R)
    c_skip, c_out, c_in = (c_R[tensors.row_of_token_S][:, None, None] for c_R in of_rows)
    if layout.has_conditioning:
        of_clean = scalings(sigma_G.new_full((1,), config.conditioning_scaled_as)).c_in
        c_in = torch.where(tensors.is_clean_S[:, None, None], of_clean, c_in)
    tokens = (c_in * x_S1P).to(dit.dtype) if dit.part.is_first else before
    F_S1P = dit.forward_packed(tokens, c_noise_R, text_L1E, fps_G, layout, **more)
    return c_skip * x_S1P + c_out * F_S1P.float() if dit.part.is_last and "through" not in more else F_S1P


# --- The steps of DDPM (arXiv 2006.11239) as noise levels, and back ---------------------------------------------------

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
