"""One batch of videos: its denoiser in all wrappers, and the latents that sampling gives."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from megadit.infer.conditioning.encode import EncodedConditioning
from megadit.infer.pipeline.batches import Batch
from megadit.infer.pipeline.step_cache import cached
from megadit.infer.sampling.callbacks import StepProgress
from megadit.infer.sampling.flow_levels import noise_of_start, with_whole_steps
from megadit.infer.sampling.guidance import Denoiser, Evaluate, embedded_guidance, guided_by_settings, within
from megadit.infer.sampling.samplers import SAMPLERS, Denoise, settings_randomness
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.diffusion.noise import latent_noise
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.conditioning import Conditioning
from megadit.models.shared.errors import UserError


def wrapped(
    denoiser: Denoiser,
    settings: SamplingSettings,
    batch: Batch,
    condition: Callable[[list[str]], Conditioning],
    encoded: EncodedConditioning | None,
    skipped: Sequence[int],
    progress: StepProgress,
    *,
    config: NetworkConfig,
    weaker: Denoiser | None,
    evaluate: Evaluate,
) -> Denoise:
    """The function of (x, sigma) that a sampler integrates: a denoiser in all of its wrappers, the innermost first.

    | wrapper               | what it does                                                            |
    |-----------------------|-------------------------------------------------------------------------|
    | `embedded_guidance`   | a guidance-distilled network gets the scale as an input                 |
    | `guided_by_settings`  | combines prompts, negative prompt, images and `weaker` by their scales  |
    | `within`              | another scale for the low-noise expert (`denoiser.boundary`)            |
    | `within`              | no adapters outside their noise levels                                  |
    | `with_whole_steps`    | rounds noise levels as a published program does                         |
    | `cached`              | predicts the calls with indices in `skipped`                            |
    | `encoded.replaces`    | returns the latents that are kept                                       |
    | `progress.around`     | reports every call                                                      |
    """
    settings, condition = embedded_guidance(settings, config, condition)

    def guided(guidance: float, adapter_scale_B: Mapping[str, Tensor]) -> Denoise:
        asked = replace(settings, guidance=guidance)
        options = {"weaker": weaker, "evaluate": evaluate}
        return guided_by_settings(asked, denoiser, condition, batch.prompts, adapter_scale_B, **options)

    def of_each_network(adapter_scale_B: Mapping[str, Tensor]) -> Denoise:
        high = guided(settings.guidance, adapter_scale_B)
        if not settings.low_guidance:
            return high
        return within((denoiser.boundary, math.inf), high, guided(settings.low_guidance, adapter_scale_B))

    denoise = of_each_network(batch.adapter_scale_B)
    if settings.adapter_interval and batch.adapter_scale_B:
        denoise = within(settings.adapter_interval, denoise, of_each_network({}))
    denoise = cached(with_whole_steps(denoise, settings, config), skipped, config.sigma_data)
    denoise = denoise if encoded is None else encoded.replaces(denoise)
    return progress.around(denoise, batch.places)


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
