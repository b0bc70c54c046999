"""`TextToVideo`: prompts in, videos out."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup

from megadit.infer.conditioning.encode import EncodedConditioning, encode_batch, encode_conditioning
from megadit.infer.conditioning.items import (
    AnyConditioning,
    Media,
    Target,
    check_conditioning,
    media_of,
    remaining_sigmas,
)
from megadit.infer.hooks.guardrail import Guardrail, load_guardrail
from megadit.infer.media.preview import LinearPreview, fit_preview
from megadit.infer.pipeline.adapters import (
    CACHE_BYTES,
    NO_ADAPTERS,
    AdapterCache,
    Scales,
    adapted_defaults,
    adapter_cache,
    hold_adapters,
)
from megadit.infer.pipeline.batches import (
    DECODE,
    DENOISE,
    Around,
    Batch,
    StepCallback,
    StepProgress,
    Videos,
    cuts_of,
    nothing_around,
    solve,
    wrapped,
)
from megadit.infer.pipeline.results import GeneratedVideo, GeneratedVideos, origin_of
from megadit.infer.pipeline.step_cache import CachePlan, bundle_plans, cached_calls
from megadit.infer.runtimes.distributed import DevicePlacement
from megadit.infer.runtimes.load import (
    WeakerDenoisers,
    check_low_guidance,
    check_runtime,
    load_denoiser,
    load_text_encoder,
    no_autoguidance_denoiser,
    taken,
    with_exported_networks,
    with_exported_text_network,
)
from megadit.infer.runtimes.options import AUTO, RuntimeOptions, chosen_dtype, warn_of_cost
from megadit.infer.runtimes.ranks import split_over_ranks
from megadit.infer.runtimes.torch import each_in_float32, find_device, find_dtype, float32_by_default, one_behind
from megadit.infer.sampling.guidance import (
    Denoiser,
    Evaluate,
    GuidanceConvention,
    guidance_scale,
    in_one_batch,
    in_turn,
)
from megadit.infer.sampling.resolve import resolve_settings
from megadit.infer.sampling.samplers import num_denoiser_calls
from megadit.infer.sampling.schedules import settings_sigmas
from megadit.models.bundle import Bundle, check_component, open_bundle
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.diffusion.noise import seed_key
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.host_to_device import sent_together
from megadit.models.networks.conditioning import Conditioning
from megadit.models.shared.cli.setting import plain
from megadit.models.text_encoders import TextEncoder
from megadit.models.text_encoders.base import TextFeaturesCache, on_device
from megadit.models.text_encoders.image_encoder import ImageEncoder
from megadit.models.tokenizers import VideoTokenizer


class TextToVideo:
    """Generates videos from prompts: opened by `from_pretrained`, then called.

    The initial noise of a video depends on its seed alone, not on the batch or the place in it.
    """

    def __init__(
        self,
        *,
        denoiser: Denoiser,
        tokenizer: VideoTokenizer,
        text_encoder: TextEncoder,
        config: NetworkConfig,
        defaults: SamplingSettings,
        device: torch.device | str = "cpu",
        evaluate: Evaluate = in_one_batch,
        load_weaker: Callable[[str], Denoiser] = no_autoguidance_denoiser,
        reload_text_encoder: Callable[[], TextEncoder] | None = None,
        guardrail: Guardrail | None = None,
        adapters: AdapterCache | None = None,
        conditionings: Collection[str] = (),
        image_encoder: ImageEncoder | None = None,
        cache_plans: Callable[[], Sequence[CachePlan]] = tuple,
        overlap_decoding: bool = False,
        origin: Mapping[str, Any] = MappingProxyType({}),
        reopen: Callable[[], "TextToVideo"] | None = None,
    ) -> None:
        """Use `from_pretrained` to open a bundle; this takes its components.

        Args:
            evaluate: runs the conditional and unconditional pass of guidance.
            load_weaker: loads the denoiser of a checkpoint for autoguidance.
            reload_text_encoder: frees the text encoder while sampling, and loads it again by this.
            adapters: the denoiser's adapter cache, if it supports adapters.
            conditionings: the kinds that the network was trained with (`Bundle.conditionings`).
            image_encoder: gives features of conditioning images to networks that read them.
            cache_plans: gives the plans that `cache_budget` chooses from.
            overlap_decoding: decodes a batch while the next one is sampled.
            origin: kept in the record of each video (`results.origin_of`).
            reopen: opens the same pipeline again where it cannot be copied (sessions, processes, threads).
        """
        self.denoiser = denoiser
        self.tokenizer = tokenizer
        self.text_encoder = TextFeaturesCache(text_encoder, reload_text_encoder)
        self.config = config
        self.defaults = defaults
        self.device = torch.device(device)
        self.evaluate = evaluate
        self.guardrail = guardrail
        self.conditionings = conditionings
        self._image_encoder = image_encoder
        self._adapters = adapters
        self._cache_plans = cache_plans
        self._overlap_decoding = overlap_decoding
        self._origin = dict(origin)
        self._reopen = reopen
        self._load_weaker = load_weaker
        self._preview: LinearPreview | None = None

    @classmethod
    @float32_by_default()
    def from_pretrained(
        cls,
        path: str | Path | Bundle,
        *,
        tokenizer: VideoTokenizer | None = None,
        text_encoder: TextEncoder | None = None,
        adapter_bytes: int = CACHE_BYTES,
        opens_paths: bool = True,
        split_guidance: ProcessGroup | None = None,
        ranks: DevicePlacement | None = None,
        **options: Any,
    ) -> "TextToVideo":
        """The pipeline of a bundle (opened or not, or by its name in a hub's cache), or of a training directory.

        Args:
            tokenizer, text_encoder: used instead of loading the bundle's copy; must be the same.
            adapter_bytes: limit of the unused adapters that stay in memory.
            opens_paths: without it, no setting may open another checkpoint.
            split_guidance: processes of torchrun that share the passes of guidance.
            ranks: without torchrun, processes that this one starts to share the network's matrices, the tokens of a
                video, and the passes (`runtimes/distributed.py`).
            options: fields of `RuntimeOptions`: device, dtype, runtime, compile, ...

        Raises:
            UserError: if there is no such checkpoint, device or dtype, or a component is not the one trained with.
        """
        asked = {name: value for name, value in locals().items() if name not in ("cls", "options")} | options
        running = RuntimeOptions(**options)
        place = find_device(running.device)
        check_runtime(running, num_ranks=running.num_ranks if ranks is None else ranks.per_share, device=place)
        bundle = path if isinstance(path, Bundle) else open_bundle(path)
        runtime, dtype = running.name, chosen_dtype(running.dtype or AUTO, bundle, place, running.name)
        number_type = find_dtype(dtype)
        warn_of_cost(place, number_type)
        guardrail = load_guardrail(running.guardrail_dir, bundle) if running.guardrail_dir or bundle.license else None
        tokenizer = tokenizer or bundle.load_tokenizer()
        text_encoder = text_encoder or bundle.load_text_encoder()
        check_component(bundle, "tokenizer", tokenizer)
        check_component(bundle, "text_encoder", text_encoder)
        load = partial(load_denoiser, options=running, device=place, dtype=number_type, ranks=ranks)
        evaluate = in_one_batch if running.batch_guidance else in_turn
        evaluate = evaluate if split_guidance is None else split_over_ranks(split_guidance)
        denoiser = load(bundle)
        reload = partial(load_text_encoder, bundle, runtime, place)
        is_plain = running.is_torch and not (running.resident_blocks or running.cuda_graphs or ranks)
        return cls(
            denoiser=denoiser,
            adapters=adapter_cache(
                denoiser,
                bundle,
                runtime,
                adapter_bytes,
                has_plain_blocks=not (running.compile or running.resident_blocks),
                is_distributed=ranks is not None,
            ),
            tokenizer=with_exported_networks(tokenizer, bundle, runtime, place),
            text_encoder=with_exported_text_network(text_encoder, bundle, runtime, place),
            config=bundle.config,
            defaults=bundle.defaults,
            device=place,
            evaluate=evaluate,
            load_weaker=WeakerDenoisers(bundle, load) if opens_paths else no_autoguidance_denoiser,
            reload_text_encoder=reload if running.offload_text_encoder else None,
            reopen=None if is_plain else partial(cls.from_pretrained, **asked),
            guardrail=guardrail,
            conditionings=taken(bundle, runtime),
            image_encoder=on_device(bundle.load_image_encoder(), place),
            cache_plans=partial(bundle_plans, bundle, running.cache_measure),
            overlap_decoding=running.overlap_decoding,
            origin=origin_of(bundle, dtype=dtype, runtime=runtime, cache_measure=running.cache_measure),
        )

    def __reduce_ex__(self, protocol: int) -> Any:
        """Pickle the weights of a torch network; other runtimes open the bundle again where the pickle is loaded."""
        return super().__reduce_ex__(protocol) if self._reopen is None else (_reopened, (self._reopen, self.defaults))

    def __repr__(self) -> str:
        default = self.defaults
        size = f"{default.num_frames} frames of {default.width}x{default.height}"
        return f"<TextToVideo {self.config.family}, {self.config.outline}: {size}>"

    def __call__(
        self,
        prompts: Sequence[str] | None = None,
        *,
        seeds: int | Sequence[int] = 0,
        guidance: float | None = None,
        guidance_convention: GuidanceConvention = "standard",
        batch_size: int | None = None,
        conditioning: AnyConditioning = None,
        adapters: Scales | Sequence[Scales] = NO_ADAPTERS,
        on_step: StepCallback | None = None,
        **settings: Any,
    ) -> GeneratedVideos:
        """One video for each prompt, in order.

        Args:
            seeds: one seed for all prompts, or a list with one for each.
            batch_size: videos per batch (None: as many as `TOKENS_PER_BATCH` allows).
            conditioning: frames, a clip, a mask: one `ConditioningItem`, a tuple of several, or a list with either, or
                None, for each prompt.
            adapters: {path: scale}, or a list of these, one for each prompt; their defaults override the bundle's.
            on_step: called after every denoiser call; may look at a preview, and cancels by returning False.
            settings: fields of `SamplingSettings` (`num_frames`, `height`, `sampler`, `num_steps`, ...); those left
                out, or None, take the bundle's defaults. `num_frames` may be any number: more are generated where the
                tokenizer needs them, and the tail is cut. One frame is an image.

        Raises:
            UserError: for anything that cannot be generated, before the network is called.
            Cancelled: if `on_step` cancels.
        """
        if guidance is not None:
            settings["guidance"] = guidance_scale(plain(guidance), guidance_convention)
        resolved = resolve_settings(adapted_defaults(self.defaults, adapters), **settings)
        per_video = {"seeds": seeds, "adapters": adapters, "conditioning": conditioning}
        return GeneratedVideos(self.stream(prompts, resolved, **per_video, batch_size=batch_size, on_step=on_step))

    @each_in_float32
    def stream(
        self,
        prompts: Sequence[str],
        settings: SamplingSettings | None = None,
        *,
        seeds: int | Sequence[int] = 0,
        batch_size: int | None = None,
        conditioning: AnyConditioning = None,
        adapters: Scales | Sequence[Scales] = NO_ADAPTERS,
        on_step: StepCallback | None = None,
        skipped: Sequence[int] | None = None,
        around: Around = nothing_around,
    ) -> Iterator[GeneratedVideo]:
        """Like a call, but yields each video as soon as its batch is done, and takes all settings in one object.

        None means the bundle's defaults; see `resolve_settings`. `skipped` are the indices of denoiser calls to
        predict, instead of those that `cache_budget` chooses. `around` is entered around each stage
        (`batches.Around`).
        """
        settings = resolve_settings(adapted_defaults(self.defaults, adapters) if settings is None else settings)
        videos = Videos.read(prompts, seeds, adapters, conditioning)
        if self.guardrail is not None:
            self.guardrail.admit([*videos.prompts, *filter(None, [settings.second_prompt])])
        check_low_guidance(self.denoiser, settings)
        target = Target.of(settings, self.config, self.tokenizer)
        for media in dict.fromkeys(videos.conditioning):
            check_conditioning(media, self.conditionings, target)
        sigmas = remaining_sigmas(settings_sigmas(settings), videos.conditioning)
        skips = [skipped or ()] * len(videos.prompts)
        if skipped is None and settings.cache_budget:
            skips = cached_calls(self._cache_plans(), settings, videos.adapters, videos.conditioning, target)
        cuts = cuts_of(videos.conditioning, target, self.config, batch_size)
        self.text_encoder.prepare([*videos.prompts, settings.negative_prompt, settings.second_prompt])
        num_calls = num_denoiser_calls(settings.sampler, sigmas)
        progress = StepProgress(on_step, len(cuts) * num_calls, self.preview)

        @lru_cache(maxsize=1)  # all videos often share the same media, which are encoded once
        def encoded_of(media: Media) -> EncodedConditioning:
            return encode_conditioning(media, self.conditionings, target, self.device, self._image_encoder)

        def sampled() -> Iterator[tuple[Batch, Tensor]]:
            with hold_adapters(self._adapters, videos.adapters) as names:
                for batch in (videos.batch(here, names) for here in cuts):
                    with around(DENOISE, batch.places):
                        encoded = encode_batch(batch.conditioning, encoded_of) if any(batch.conditioning) else None
                        spare = skips[batch.places[0]]
                        latents_BCTHW = self._sample(batch, settings, sigmas, target.shape, encoded, spare, progress)
                    yield batch, latents_BCTHW

        def decoded(sample: tuple[Batch, Tensor]) -> Iterator[GeneratedVideo]:
            batch, latents_BCTHW = sample
            for place, latents_CTHW in zip(batch.places, latents_BCTHW, strict=True):
                with around(DECODE, range(place, place + 1)):
                    video_THWC = self._decode(latents_CTHW, settings.num_frames)
                yield GeneratedVideo(
                    video=video_THWC,
                    prompt=videos.prompts[place],
                    seed=videos.seeds[place],
                    settings=settings,
                    latents_CTHW=latents_CTHW.cpu(),
                    num_denoiser_calls=num_calls - len(skips[place]),
                    origin=self._origin.copy(),
                    adapters=dict(videos.adapters[place]),
                    conditioning=[part.kind for part in videos.conditioning[place]],
                )

        aside = self._overlap_decoding
        for results in one_behind(decoded, sampled(), self.device) if aside else map(decoded, sampled()):
            yield from results

    def admit_adapters(self, scales: Scales) -> None:
        """Load adapters, so that invalid ones are reported before anything is generated.

        Raises:
            UserError: as a call.
        """
        with hold_adapters(self._adapters, [scales]):
            pass

    def num_denoiser_calls(
        self,
        num_videos: int,
        settings: SamplingSettings,
        batch_size: int | None = None,
        conditioning: AnyConditioning = None,
    ) -> int:
        """Denoiser calls for `num_videos`, the `num_steps` that `on_step` reports; cached ones count too."""
        media, target = media_of(conditioning, num_videos), Target.of(settings, self.config, self.tokenizer)
        sigmas = remaining_sigmas(settings_sigmas(settings), media)
        return len(cuts_of(media, target, self.config, batch_size)) * num_denoiser_calls(settings.sampler, sigmas)

    def preview(self, latents_BCTHW: Tensor) -> np.ndarray:
        """Approximate frames of latents without decoding them: see `LinearPreview`, which the first call fits."""
        if self._preview is None:
            self._preview = fit_preview(self.tokenizer, self.device)
        return self._preview(latents_BCTHW)

    def _sample(
        self,
        batch: Batch,
        settings: SamplingSettings,
        sigmas: Tensor,
        shape: tuple[int, int, int, int],
        encoded: EncodedConditioning | None,
        skipped: Sequence[int],
        progress: StepProgress,
    ) -> Tensor:
        """Latents BCTHW, float32, of one batch."""
        [key_B] = sent_together([torch.tensor([seed_key(seed) for seed in batch.seeds])], self.device)
        seen = {} if encoded is None else encoded.seen(self.config, key_B)
        fps = 0.0 if settings.num_frames == 1 else float(settings.fps)

        def condition(texts: list[str]) -> Conditioning:
            return replace(self.text_encoder.conditioning(texts, fps).to(self.device), **seen)

        weaker = self._load_weaker(settings.autoguidance) if settings.autoguidance else None
        own = {"config": self.config, "weaker": weaker, "evaluate": self.evaluate}
        denoise = wrapped(self.denoiser, settings, batch, condition, encoded, skipped, progress, **own)
        return solve(denoise, settings, sigmas, key_B, shape, encoded)

    def _decode(self, latents_CTHW: Tensor, num_frames: int) -> np.ndarray:
        """Decode one video at a time: memory grows with the batch, results do not depend on it."""
        video_1CTHW = self.tokenizer.decode(latents_CTHW[None])
        frames_THWC = rearrange(video_1CTHW, "1 C T H W -> T H W C")[:num_frames]
        video_THWC = ((frames_THWC.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
        return video_THWC if self.guardrail is None else self.guardrail.screen(video_THWC)


def _reopened(reopen: Callable[[], TextToVideo], defaults: SamplingSettings) -> TextToVideo:
    pipeline = reopen()
    pipeline.defaults = defaults
    return pipeline
