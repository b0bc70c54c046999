"""The videos of a generation, cut into batches; the denoiser of a batch in all wrappers, and its sampled latents.

A callback after every denoiser call, if there is one, may preview and may cancel the generation. A GPU computes behind
the host, which could launch all calls before the first is done. With a callback the host waits for the call two before
(and once for the first): progress, deadlines and cancelling are at most two calls ahead of the GPU, which always has
the next call to go on with.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from megadit.infer.conditioning.encode import EncodedConditioning
from megadit.infer.conditioning.items import AnyConditioning, Media, Target, media_of, num_extra_frames, structure_of
from megadit.infer.pipeline.adapters import Scales
from megadit.infer.pipeline.step_cache import cached
from megadit.infer.sampling.guidance import Denoiser, Evaluate, embedded_guidance, guided_by_settings, within
from megadit.infer.sampling.samplers import SAMPLERS, Denoise, settings_randomness
from megadit.infer.sampling.schedules import noise_of_start, with_whole_steps
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.diffusion.noise import latent_noise
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.conditioning import Conditioning
from megadit.models.shared.cli.setting import plain
from megadit.models.shared.errors import UserError

TOKENS_PER_BATCH = 32768
"""Video tokens in one call of the denoiser (before guidance doubles them) if no batch size is set."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The videos that are sampled together."""

    places: range
    """Indices of its videos in all prompts of the generation."""
    prompts: list[str]
    seeds: list[int]
    adapter_scale_B: Mapping[str, Tensor]
    """Adapter's name at the network -> its scale for each video, float32 [B]."""
    conditioning: Sequence[Media]
    """Conditioning media of each video; all have them at the same places."""


@dataclass(frozen=True, slots=True)
class Videos:
    """Prompt, seed, adapters and conditioning media of each video of a generation."""

    prompts: list[str]
    seeds: list[int]
    adapters: list[Scales]
    conditioning: list[Media]

    @classmethod
    def read(
        cls,
        prompts: Sequence[str],
        seeds: int | Sequence[int],
        adapters: Scales | Sequence[Scales],
        conditioning: AnyConditioning,
    ) -> "Videos":
        """Check the inputs of a generation, and assign each video its own.

        Seeds, adapters and conditioning are one value for all prompts, or a list with an entry for each.

        Raises:
            UserError: for invalid prompts, and for a list of another length.
        """
        prompts = _read_prompts(prompts)
        media = media_of(conditioning, len(prompts))
        seeds = plain(seeds)
        seeds = [plain(seed) for seed in (seeds if isinstance(seeds, Sequence) else [seeds] * len(prompts))]
        for seed in seeds:
            if not isinstance(seed, int):
                raise UserError(f"seed={seed!r:.60} must be a whole number")
        if len(seeds) != len(prompts):
            raise UserError(f"got {len(seeds)} seeds for {len(prompts)} prompts; give one seed, or one for each prompt")
        adapters = [adapters] * len(prompts) if isinstance(adapters, Mapping) else list(adapters)
        if len(adapters) != len(prompts):
            raise UserError(
                f"got adapters for {len(adapters)} of {len(prompts)} prompts; give them once, or for each prompt"
            )
        scales = [{path: plain(scale) for path, scale in each.items()} for each in adapters]
        return cls(prompts, seeds, scales, media)

    def batch(self, here: slice, names: Mapping[str, str]) -> Batch:
        """Return the videos of a slice; `names` maps paths of adapters to their names at the network."""
        scales = _scales(self.adapters[here], names)
        return Batch(
            range(here.start, here.stop), self.prompts[here], self.seeds[here], scales, self.conditioning[here]
        )


def _read_prompts(prompts: Sequence[str] | None) -> list[str]:
    """Raises UserError unless the prompts are a list of texts."""
    if prompts is None:
        raise UserError("prompts are missing: give a list of texts, such as ['a red seven']")
    if isinstance(prompts, str):
        raise UserError(f"prompts must be a list; got the text {prompts!r}: write [prompt]")
    prompts = list(prompts)
    if not prompts:
        raise UserError("there is no prompt; give at least one")
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise UserError(f"prompts must be texts; got {prompt!r:.60}")
    return prompts


def cuts_of(all_media: Sequence[Media], target: Target, config: NetworkConfig, asked: int | None) -> list[slice]:
    """Slices of videos to sample together: consecutive ones with conditioning at the same places, at most `asked`."""
    _, frames, *size = target.shape
    most = frames + max(num_extra_frames(media, target) for media in all_media)
    num_tokens = config.num_tokens(most, *size)
    return cut_batches([structure_of(media, target) for media in all_media], batch_size(asked, num_tokens))


def cut_batches(structures: Sequence[Hashable], size: int) -> list[slice]:
    """Slices of consecutive videos of equal structure, at most `size` each."""
    cuts, first = [], 0
    for _, alike in groupby(structures):
        stop = first + sum(1 for _ in alike)
        cuts += [slice(start, min(start + size, stop)) for start in range(first, stop, size)]
        first = stop
    return cuts


def batch_size(asked: int | None, num_tokens: int) -> int:
    """Videos of `num_tokens` tokens that are sampled at once.

    Raises:
        UserError: if fewer than one is asked for.
    """
    if asked is None:
        return max(1, TOKENS_PER_BATCH // num_tokens)
    asked = plain(asked)
    if not isinstance(asked, int) or asked < 1:
        raise UserError(f"batch_size={asked!r:.60} must be a whole number of at least 1")
    return asked


class Cancelled(Exception):  # noqa: N818 - asked for, not an error
    """A callback ended the generation; videos that were already complete stay valid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A denoiser call that was just made."""

    step: int
    """Denoiser calls made so far, over all batches of the generation: 1..num_steps."""
    num_done: int
    """Denoiser calls that have been computed: on a GPU the first, and all but the last `CALLS_AHEAD`."""
    num_steps: int
    """Denoiser calls of the whole generation."""
    sigma: float
    """Noise level of the call."""
    videos: range
    """Indices of the prompts of this batch."""
    preview: Callable[[], np.ndarray]
    """Computes a preview of the videos: uint8 [B, T, height, width, 3], a frame for each latent frame."""


StepCallback = Callable[[Step], bool | None]
"""Called after every denoiser call. Returning False, or raising, ends the generation before the next one."""


CALLS_AHEAD = 2
"""Denoiser calls that a GPU may have yet to finish when the callback is told of the last."""

DENOISE, DECODE = "denoise", "decode"
Around = Callable[[str, range], AbstractContextManager[None]]
"""(stage, indices of its prompts) -> context that is entered around the stage (`DENOISE` of a batch, `DECODE` of a
video), in its thread."""


def nothing_around(part: str, videos: range) -> AbstractContextManager[None]:
    return nullcontext()


class StepProgress:
    """Reports every denoiser call of a generation, over all batches, to a callback if there is one."""

    def __init__(self, on_step: StepCallback | None, num_steps: int, preview: Callable[[Tensor], np.ndarray]) -> None:
        self._on_step, self._done, self._num_steps, self._preview = on_step, 0, num_steps, preview
        self._running: deque[torch.cuda.Event] = deque()
        """An event behind each call that may not be done."""

    def around(self, denoise: Denoise, videos: range) -> Denoise:
        """Wrap the denoiser of a batch of these videos; it raises `Cancelled` where the callback returns False."""

        def reported(x: Tensor, sigma_B: Tensor) -> Tensor:
            x0 = denoise(x, sigma_B)
            self._done += 1
            if self._on_step is None:
                return x0
            self._wait(x0)
            if self._on_step(self._step(x0, sigma_B, videos)) is False:
                raise Cancelled(f"cancelled after denoiser call {self._done} of {self._num_steps}")
            return x0

        return reported

    def _wait(self, x0: Tensor) -> None:
        """Waits for the call `CALLS_AHEAD` before the one that computes x0 on a GPU, and for the first."""
        if x0.device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(x0.device))
            self._running.append(event)
            if len(self._running) > CALLS_AHEAD or self._done == 1:
                self._running.popleft().synchronize()

    def _step(self, x0: Tensor, sigma_B: Tensor, videos: range) -> Step:
        return Step(
            step=self._done,
            num_done=self._done - len(self._running),
            num_steps=self._num_steps,
            sigma=sigma_B[0].item(),
            videos=videos,
            preview=lambda: self._preview(x0),
        )


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
    denoise = with_whole_steps(denoise, settings, config)
    denoise = cached(denoise, skipped, config.sigma_data) if skipped else denoise
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


def _scales(adapters: Sequence[Scales], names: Mapping[str, str]) -> dict[str, Tensor]:
    used = dict.fromkeys(path for scales in adapters for path in scales)
    return {names[path]: torch.tensor([float(scales.get(path, 0.0)) for scales in adapters]) for path in used}
