"""One batch of videos: its denoiser under guidance and adapters, and the latents that sampling gives."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from megadit.infer.conditioning.encode import EncodedConditioning
from megadit.infer.pipeline.batches import Batch
from megadit.infer.pipeline.step_cache import cached
from megadit.infer.sampling.flow_levels import noise_of_start, with_whole_steps
from megadit.infer.sampling.guidance import Denoiser, Evaluate, embedded_guidance, guided_by_settings, within
from megadit.infer.sampling.samplers import SAMPLERS, Denoise, settings_randomness
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.diffusion.noise import latent_noise
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.conditioning import Conditioning
from megadit.models.shared.errors import UserError


def denoise_by_settings(
    settings: SamplingSettings,
    batch: Batch,
    denoiser: Denoiser,
    condition: Callable[[list[str]], Conditioning],
    *,
    weaker: Denoiser | None,
    evaluate: Evaluate,
) -> Denoise:
    """The denoiser of a batch with guidance, and with adapters at the noise levels where they act.

    `condition`, `weaker` and `evaluate` are those of `guided_by_settings`. Where `low_guidance` is set, `denoiser` is
    an `ExpertDenoiser`.
    """

    def guided(guidance: float, adapter_scale_B: Mapping[str, Tensor]) -> Denoise:
        asked = replace(settings, guidance=guidance)
        options = {"weaker": weaker, "evaluate": evaluate}
        return guided_by_settings(asked, denoiser, condition, batch.prompts, adapter_scale_B, **options)

    def of_each_network(adapter_scale_B: Mapping[str, Tensor]) -> Denoise:
        high = guided(settings.guidance, adapter_scale_B)
        if not settings.low_guidance:
            return high
        return within((denoiser.boundary, math.inf), high, guided(settings.low_guidance, adapter_scale_B))

    adapted = of_each_network(batch.adapter_scale_B)
    if not (settings.adapter_interval and batch.adapter_scale_B):
        return adapted
    return within(settings.adapter_interval, adapted, of_each_network({}))


def sample(
    batch: Batch,
    settings: SamplingSettings,
    sigmas: Tensor,
    key_B: Tensor,
    shape: Sequence[int],
    encoded: EncodedConditioning | None,
    condition: Callable[[list[str]], Conditioning],
    skipped: Sequence[int],
    around: Callable[[Denoise, range], Denoise],
    *,
    denoiser: Denoiser,
    config: NetworkConfig,
    weaker: Denoiser | None,
    evaluate: Evaluate,
) -> Tensor:
    """Return the latents BCTHW, float32, of one batch: `solve` over `sigmas` [num_steps + 1] with the denoiser of
    `denoise_by_settings`; the calls with indices in `skipped` are predicted; `around` wraps the denoiser."""
    settings, condition = embedded_guidance(settings, config, condition)
    denoise = denoise_by_settings(settings, batch, denoiser, condition, weaker=weaker, evaluate=evaluate)
    denoise = cached(with_whole_steps(denoise, settings, config), skipped, config.sigma_data)
    denoise = denoise if encoded is None else encoded.replaces(denoise)
    return solve(around(denoise, batch.places), settings, sigmas, key_B, shape, encoded)


def solve(
    denoise: Denoise,
    settings: SamplingSettings,
    sigmas: Tensor,
    key_B: Tensor,
    shape: Sequence[int],
    encoded: EncodedConditioning | None,
) -> Tensor:
    """Return the latents BCTHW, float32, solved from the first to the last of `sigmas` [num_steps + 1].

    The initial state is the noise of `key_B`, added to `encoded` latents where there are some.
    `settings.noise_scale` scales the noise where no latents are kept.

    Raises:
        UserError: if the latents are not finite.
    """
    sigma, noise_BCTHW = sigmas[0].item(), latent_noise(key_B, shape)
    scale = settings.noise_scale * noise_of_start(settings, sigmas)
    if encoded is None:
        x = sigma * (scale * noise_BCTHW).double()
    else:
        x = encoded.initial_state(sigma, noise_BCTHW, scale)
    noise = settings_randomness(settings, key_B, shape)
    latents_BCTHW = SAMPLERS[settings.sampler](denoise, x, sigmas, *noise).float()
    if not latents_BCTHW.isfinite().all():
        raise UserError("the latents are not finite numbers; try dtype float32 or bfloat16, or a lower guidance scale")
    return latents_BCTHW
