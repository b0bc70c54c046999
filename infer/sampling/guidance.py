"""Guidance: combines outputs of a conditional denoiser into the function D(x, sigma) that a sampler integrates.

All forms are sums  D = base + sum_k scale_k (D_k - base)  of the outputs of a few branches (a denoiser and its
conditions), and differ in the branches:

    classifier-free (arXiv 2207.12598)   base: no text, or the negative prompt;  D_1: the prompt
    autoguidance (arXiv 2406.02507)      base: a weaker network, same prompt;    D_1: the prompt
    two conditions (arXiv 2206.01714)    base: no text, or the negative prompt;  D_1, D_2: one prompt each
    text and image (arXiv 2211.09800)    base: neither;  D_1: both, scale s_text;  D_2: image, scale s_image - s_text
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from megadit.infer.sampling.samplers import Denoise
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.conditioning import Conditioning
from megadit.models.shared.errors import choose_one

GuidanceConvention = Literal["standard", "nemo"]


class Denoiser(Protocol):
    """D(x_BCTHW, sigma_B, conditioning) -> x0_BCTHW, float32: the interface of every runtime."""

    def __call__(self, x_BCTHW: Tensor, sigma_B: Tensor, conditioning: Conditioning, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Branch:
    """One of the terms that guidance combines: a denoiser and its conditions."""

    denoiser: Denoiser
    conditioning: Conditioning


Ask = Callable[[Tensor, Tensor], list[Tensor]]
"""(x, sigma_B) -> the x0 of each branch."""
Evaluate = Callable[[Sequence[Branch]], Ask]
"""Branches -> an `Ask` (`in_one_batch`, `in_turn`); their conditions are concatenated once for all sigmas."""


def guidance_scale(guidance: float, convention: GuidanceConvention = "standard") -> float:
    """The scale in D = uncond + scale (cond - uncond) for a number under a convention.

    `standard` means the scale itself; NeMo and DFM wrote cond + g (cond - uncond), which is a scale of 1 + g.

    Raises:
        UserError: for an unknown convention.
    """
    choose_one(convention, get_args(GuidanceConvention), f"guidance convention {convention!r} is unknown")
    return guidance + 1 if convention == "nemo" else guidance


def in_one_batch(branches: Sequence[Branch]) -> Ask:
    """Evaluate branches of one denoiser in one call with a larger batch; different denoisers run in turn, and so do
    branches with and without conditioning media."""
    calls: list[tuple[Denoiser, list[int], Conditioning]] = []
    together: dict[tuple[int, bool], list[int]] = {}
    for place, branch in enumerate(branches):
        together.setdefault((id(branch.denoiser), branch.conditioning.clean is None), []).append(place)
    for places in together.values():
        conditioning = Conditioning.concatenate([branches[place].conditioning for place in places])
        calls.append((branches[places[0]].denoiser, places, conditioning))

    def ask(x: Tensor, sigma_B: Tensor) -> list[Tensor]:
        predictions: dict[int, Tensor] = {}
        for denoiser, places, conditioning in calls:
            answer = denoiser(torch.cat([x] * len(places)), torch.cat([sigma_B] * len(places)), conditioning)
            predictions.update(zip(places, answer.chunk(len(places)), strict=True))
        return [predictions[place] for place in range(len(branches))]

    return ask


def in_turn(branches: Sequence[Branch]) -> Ask:
    """Evaluate each branch in its own call: with two branches, half the memory of a shared call."""
    return lambda x, sigma_B: [branch.denoiser(x, sigma_B, branch.conditioning) for branch in branches]


def guided(
    conditions: Sequence[Branch],
    scales: Sequence[float],
    base: Branch,
    *,
    interval: tuple[float, ...] = (),
    rescale: float = 0.0,
    evaluate: Evaluate = in_one_batch,
    num_targets: int | None = None,
) -> Denoise:
    """D = base + sum_k scale_k (D_k - base).

    Outside the noise levels of `interval` (arXiv 2404.07724), and where the scales add up to 1, the base is not
    evaluated: the result is the mean of the first `num_targets` conditions (None: all), weighted by their scales.
    `rescale` mixes in the result rescaled to the per-sample standard deviation of that mean (arXiv 2305.08891, eqs. 15
    and 16), which high scales inflate.
    """
    total, total_scale = sum(scales), sum(scales[:num_targets])
    low, high = interval or (0.0, math.inf)
    ask_conditions, ask_all = evaluate(conditions[:num_targets]), evaluate([*conditions, base])

    def unguided(x0_K: Sequence[Tensor]) -> Tensor:
        x0_K = x0_K[:num_targets]
        if len(x0_K) == 1 or total_scale == 0:
            return x0_K[0]
        return sum(scale / total_scale * x0 for scale, x0 in zip(scales, x0_K, strict=False))

    def denoise(x: Tensor, sigma_B: Tensor) -> Tensor:
        if total == 1 or not low <= sigma_B[0].item() <= high:
            return unguided(ask_conditions(x, sigma_B))
        *x0_K, x0_base = ask_all(x, sigma_B)
        x0 = x0_base + sum(scale * (x0 - x0_base) for scale, x0 in zip(scales, x0_K, strict=True))
        return _rescaled(x0, unguided(x0_K), rescale) if rescale else x0

    return denoise


def guided_by_settings(
    settings: SamplingSettings,
    denoiser: Denoiser,
    condition: Callable[[list[str]], Conditioning],
    prompts: list[str],
    adapter_scale_B: Mapping[str, Tensor],
    *,
    weaker: Denoiser | None = None,
    evaluate: Evaluate = in_one_batch,
) -> Denoise:
    """Return the denoiser of prompts with the guidance of the settings.

    `condition` maps texts to conditions, with the videos' conditioning media; `weaker` is the network of
    autoguidance, which has no adapters.
    """

    def branch(texts: list[str]) -> Branch:
        return Branch(denoiser, replace(condition(texts), adapter_scale_B=adapter_scale_B))

    count = len(prompts)
    conditions, scales = [branch(prompts)], [settings.guidance]
    if settings.second_prompt:
        conditions.append(branch([settings.second_prompt] * count))
        scales.append(settings.second_guidance)
    num_targets = len(conditions)
    base = branch([settings.negative_prompt] * count) if weaker is None else Branch(weaker, condition(prompts))
    if base.conditioning.clean is not None and settings.image_guidance != 1:
        # D = D(0, 0) + s_image (D(i, 0) - D(0, 0)) + s_text (D(i, t) - D(i, 0)) (arXiv 2211.09800, eq. 3)
        conditions.append(base)
        scales.append(settings.image_guidance - sum(scales))
        base = Branch(base.denoiser, replace(base.conditioning, clean=None, image_BIE=None))
    return guided(
        conditions,
        scales,
        base,
        interval=settings.guidance_interval,
        rescale=settings.guidance_rescale,
        evaluate=evaluate,
        num_targets=num_targets,
    )


def embedded_guidance(
    settings: SamplingSettings, config: NetworkConfig, condition: Callable[[list[str]], Conditioning]
) -> tuple[SamplingSettings, Callable[[list[str]], Conditioning]]:
    """Return settings and conditions for the network: a guidance-distilled one gets the scale as an input.

    (Meng et al., arXiv 2210.03142, section 3.2.)
    """
    if config.guidance_embedding_range is None:
        return settings, condition

    def with_scale(texts: list[str]) -> Conditioning:
        conditioning = condition(texts)
        return replace(conditioning, guidance_B=torch.full_like(conditioning.fps_B, settings.guidance))

    return replace(settings, guidance=1.0), with_scale


def within(interval: tuple[float, float], inside: Denoise, outside: Denoise) -> Denoise:
    """Use the first function at the noise levels of `interval`, the second at all others."""
    low, high = interval
    return lambda x, sigma_B: (inside if low <= sigma_B[0].item() <= high else outside)(x, sigma_B)


def _rescaled(x0: Tensor, x0_unguided: Tensor, rescale: float) -> Tensor:
    ratio = _deviation(x0_unguided) / _deviation(x0).clamp(min=1e-8)
    return x0 * (rescale * ratio + (1 - rescale))


def _deviation(x: Tensor) -> Tensor:
    """Standard deviation of each sample, [B, 1, ...]."""
    return x.flatten(1).std(1).reshape(-1, *[1] * (x.ndim - 1))
