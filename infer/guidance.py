"""Guidance: wrappers that turn a conditional denoiser into the function of (x, sigma) that a sampler solves."""

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from megadit.infer.samplers import Denoise
from megadit.models.conditioning import Conditioning
from megadit.models.support import UserError

GuidanceConvention = Literal["standard", "nemo"]


class Denoiser(Protocol):
    """D(x_BCTHW, sigma_B, conditioning) -> x0_BCTHW, float32: what every runtime offers."""

    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning, /) -> Tensor: ...


def guidance_scale(guidance: float, convention: GuidanceConvention = "standard") -> float:
    """The scale of D = uncond + scale (cond - uncond) that a number means under a convention.

    `standard` means the scale itself; NeMo and DFM wrote cond + g (cond - uncond), which is a scale of 1 + g.

    Raises:
        UserError: for an unknown convention.
    """
    if convention not in get_args(GuidanceConvention):
        known = ", ".join(get_args(GuidanceConvention))
        raise UserError(f"guidance convention {convention!r} is unknown; choose one of {known}")
    return guidance + 1 if convention == "nemo" else guidance


def classifier_free_guidance(
    denoiser: Denoiser, conditioning: Conditioning, *, scale: float, negative: Conditioning | None = None
) -> Denoise:
    """D(x; sigma) = D_uncond + scale (D_cond - D_uncond), both halves in one call of twice the batch.

    (arXiv 2207.12598, eq. 6 with w = scale - 1.) `negative` stands in for the null text of the unconditional half.
    A scale of 1 is D_cond, and asks for that half alone.
    """
    if scale == 1:
        return lambda x, sigma_B: denoiser(x, sigma_B, conditioning)
    uncond = conditioning.null() if negative is None else negative
    both = Conditioning.concatenate([conditioning, uncond])

    def guided(x: Tensor, sigma_B: Tensor) -> Tensor:
        x0_cond, x0_uncond = denoiser(torch.cat([x, x]), torch.cat([sigma_B, sigma_B]), both).chunk(2)
        return x0_uncond + scale * (x0_cond - x0_uncond)

    return guided
