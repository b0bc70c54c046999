"""`TextToVideo`: prompts in, videos out."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from megadit.infer.checkpoints import open_bundle
from megadit.infer.guidance import Denoiser, GuidanceConvention, classifier_free_guidance, guidance_scale
from megadit.infer.preview import LinearPreview, fit_preview
from megadit.infer.runtimes.torch import TorchDenoiser, find_device, find_dtype
from megadit.infer.samplers import SAMPLERS, find_sampler, num_denoiser_calls
from megadit.infer.schedules import karras_sigmas
from megadit.infer.steps import StepCallback, StepTeller
from megadit.models.bundle import Bundle, SamplingDefaults
from megadit.models.conditioning import Conditioning
from megadit.models.config import DiTConfig
from megadit.models.noise import latent_noise, seed_key
from megadit.models.support import UserError
from megadit.models.text_encoders import TextEncoder
from megadit.models.tokenizers import VideoTokenizer

TOKENS_PER_BATCH = 32768
"""Video tokens that one call of the denoiser handles (before guidance doubles them) where no batch size is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedVideo:
    video: np.ndarray
    """uint8 THWC, 0..255."""
    prompt: str
    seed: int
    settings: SamplingDefaults
    """Everything else that decides the video, in the standard guidance convention."""


class TextToVideo:
    """Generates videos from prompts; see `load` and `generate`.

    The initial noise of a video is a function of its seed alone, so that neither its place in a batch nor its company
    changes it.
    """

    def __init__(
        self,
        *,
        denoiser: Denoiser,
        tokenizer: VideoTokenizer,
        text_encoder: TextEncoder,
        config: DiTConfig,
        defaults: SamplingDefaults,
        device: torch.device | str = "cpu",
    ) -> None:
        self.denoiser = denoiser
        self.tokenizer = tokenizer
        self.text_encoder = text_encoder
        self.config = config
        self.defaults = defaults
        self.device = torch.device(device)
        self._preview: LinearPreview | None = None

    @classmethod
    def load(
        cls,
        path: str | Path | Bundle,
        *,
        device: str = "auto",
        dtype: str = "float32",
        tokenizer: VideoTokenizer | None = None,
        text_encoder: TextEncoder | None = None,
    ) -> "TextToVideo":
        """The pipeline of a bundle (opened or not), or of a training directory (see `open_bundle`).

        A `tokenizer` or `text_encoder` given here spares loading the bundle's copy, and must be the same. `dtype` is
        that of the network; preconditioning is float32 and the sampler's state float64 in any case.

        Raises:
            UserError: if there is no such checkpoint, device or dtype, or a part is not the one trained with.
        """
        place, number_type = find_device(device), find_dtype(dtype)
        bundle = path if isinstance(path, Bundle) else open_bundle(path)
        tokenizer = tokenizer or bundle.load_tokenizer()
        text_encoder = text_encoder or bundle.load_text_encoder()
        _check_fingerprint(bundle, "tokenizer", tokenizer)
        _check_fingerprint(bundle, "text_encoder", text_encoder)
        dit = bundle.load_dit(device=place, dtype=number_type)
        return cls(
            denoiser=TorchDenoiser(dit, device=place, dtype=number_type),
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            config=bundle.config,
            defaults=bundle.defaults,
            device=place,
        )

    def generate(
        self,
        prompts: Sequence[str],
        *,
        seeds: int | Sequence[int] = 0,
        negative_prompt: str | None = None,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        fps: float | None = None,
        guidance: float | None = None,
        guidance_convention: GuidanceConvention = "standard",
        num_steps: int | None = None,
        sampler: str | None = None,
        batch_size: int | None = None,
        on_step: StepCallback | None = None,
    ) -> list[GeneratedVideo]:
        """One video for each prompt, in order.

        What is None comes from the bundle's defaults. One seed serves every prompt; a list gives each its own.
        `num_frames` may be any number: more are generated where the tokenizer needs them, and the tail is cut. One
        frame is an image. `batch_size` videos are made at once (None: as many as `TOKENS_PER_BATCH` allows).
        `on_step` is told of every denoiser call, may look at a preview, and cancels by returning False.

        Raises:
            UserError: for anything that cannot be generated, before the network is asked.
            Cancelled: if `on_step` cancels.
        """
        settings = resolve_settings(
            self.defaults,
            negative_prompt=negative_prompt,
            num_frames=num_frames,
            height=height,
            width=width,
            fps=fps,
            guidance=None if guidance is None else guidance_scale(guidance, guidance_convention),
            num_steps=num_steps,
            sampler=sampler,
        )
        return list(self.stream(prompts, settings, seeds=seeds, batch_size=batch_size, on_step=on_step))

    def stream(
        self,
        prompts: Sequence[str],
        settings: SamplingDefaults | None = None,
        *,
        seeds: int | Sequence[int] = 0,
        batch_size: int | None = None,
        on_step: StepCallback | None = None,
    ) -> Iterator[GeneratedVideo]:
        """Like `generate`, but gives each video as soon as its batch is done, and takes all settings in one.

        None means the bundle's defaults; see `resolve_settings`.
        """
        settings = resolve_settings(self.defaults if settings is None else settings)
        prompts, seeds = _paired(prompts, seeds)
        batch_size = self._batch_size(settings, batch_size)
        teller = StepTeller(on_step, self.num_denoiser_calls(len(prompts), settings, batch_size), self.preview)
        places = range(len(prompts))
        for batch in (places[start : start + batch_size] for start in places[::batch_size]):
            latents_BCTHW = self._sample(prompts, seeds, settings, teller, batch)
            for place, latents_CTHW in zip(batch, latents_BCTHW, strict=True):
                video = self._decode(latents_CTHW, settings.num_frames)
                yield GeneratedVideo(video=video, prompt=prompts[place], seed=seeds[place], settings=settings)

    def num_denoiser_calls(self, num_videos: int, settings: SamplingDefaults, batch_size: int | None = None) -> int:
        """Denoiser calls that `num_videos` take: what `on_step` is told as `num_steps`."""
        num_batches = math.ceil(num_videos / self._batch_size(settings, batch_size))
        return num_batches * num_denoiser_calls(settings.sampler, _sigmas(settings))

    def _batch_size(self, settings: SamplingDefaults, batch_size: int | None) -> int:
        if batch_size is None:
            _, (_, *sizes) = latent_size(settings, self.config, self.tokenizer)
            return max(1, TOKENS_PER_BATCH // math.prod(self.config.token_grid(*sizes)))
        if batch_size < 1:
            raise UserError(f"batch_size={batch_size} must be at least 1")
        return batch_size

    def preview(self, latents_BCTHW: Tensor) -> np.ndarray:
        """What latents look like, without decoding them: see `LinearPreview`, which the first call fits."""
        if self._preview is None:
            self._preview = fit_preview(self.tokenizer, self.device)
        return self._preview(latents_BCTHW)

    def _sample(
        self, prompts: list[str], seeds: list[int], settings: SamplingDefaults, teller: StepTeller, batch: range
    ) -> Tensor:
        """Latents BCTHW, float32, of one batch."""
        prompts, seeds = [prompts[place] for place in batch], [seeds[place] for place in batch]
        _, shape = latent_size(settings, self.config, self.tokenizer)
        key_B = torch.tensor([seed_key(seed) for seed in seeds], device=self.device)
        sigmas = _sigmas(settings)
        negative = self._conditioning([settings.negative_prompt] * len(prompts), settings)
        denoise = classifier_free_guidance(
            self.denoiser, self._conditioning(prompts, settings), scale=settings.guidance, negative=negative
        )
        x = sigmas[0].item() * latent_noise(key_B, shape).double()
        latents = SAMPLERS[settings.sampler](teller.around(denoise, batch), x, sigmas).float()
        if not latents.isfinite().all():
            raise UserError("the latents are not finite numbers; try dtype float32 or bfloat16, or less guidance")
        return latents

    def _conditioning(self, prompts: list[str], settings: SamplingDefaults) -> Conditioning:
        features = self.text_encoder.encode(prompts)
        fps = 0.0 if settings.num_frames == 1 else float(settings.fps)
        fps_B = torch.full((len(prompts),), fps)
        return Conditioning(features.features_BLE, features.length_B, fps_B).to(self.device)

    def _decode(self, latents_CTHW: Tensor, num_frames: int) -> np.ndarray:
        """One video at a time: a decoder's memory grows with the batch, and no result depends on it."""
        video_1CTHW = self.tokenizer.decode(latents_CTHW[None])
        frames_THWC = rearrange(video_1CTHW, "1 C T H W -> T H W C")[:num_frames]
        return ((frames_THWC.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu().numpy()


def resolve_settings(defaults: SamplingDefaults, **given) -> SamplingDefaults:
    """The defaults with what is given (and not None) in their place.

    Raises:
        UserError: for a value that no video can have.
    """
    settings = replace(defaults, **{name: value for name, value in given.items() if value is not None})
    if settings.num_frames > 1 and not 0 < settings.fps < math.inf:
        raise UserError(f"fps={settings.fps} must be greater than 0")
    return replace(settings, sampler=find_sampler(settings.sampler))


def latent_size(
    settings: SamplingDefaults, config: DiTConfig, tokenizer: VideoTokenizer
) -> tuple[int, tuple[int, int, int, int]]:
    """Frames that the latents decode to (at least `settings.num_frames`), and the latents' shape (C, T, H, W).

    Raises:
        UserError: if tokenizer and patch together cannot divide height or width; names the nearest sizes they can.
    """
    multiple = tokenizer.spatial_compression * config.patch_spatial
    for name, size in (("height", settings.height), ("width", settings.width)):
        if size % multiple:
            below, above = size // multiple * multiple, math.ceil(size / multiple) * multiple
            choices = f"{below} or {above}" if below else f"{above}"
            raise UserError(f"{name}={size} is not a multiple of {multiple}; use {choices}")
    frames = tokenizer.frames_covering(settings.num_frames)
    while (shape := tokenizer.latent_shape(frames, settings.height, settings.width))[1] % config.patch_temporal:
        frames = tokenizer.frames_covering(frames + 1)
    return frames, shape


def _check_fingerprint(bundle: Bundle, part: str, given: VideoTokenizer | TextEncoder) -> None:
    """Any part but the one trained with would give noise without an error."""
    expected = bundle.manifest["fingerprints"][part]
    if given.fingerprint() != expected:
        name = part.replace("_", " ")
        raise UserError(
            f"this {name} (fingerprint {given.fingerprint()}) is not the one that {bundle.path} was trained with "
            f"({expected})"
        )


def _paired(prompts: Sequence[str], seeds: int | Sequence[int]) -> tuple[list[str], list[int]]:
    if isinstance(prompts, str):
        raise UserError(f"prompts must be a list; got the text {prompts!r}: write [prompt]")
    if not prompts:
        raise UserError("there is no prompt; give at least one")
    seeds = [seeds] * len(prompts) if isinstance(seeds, int) else list(seeds)
    if len(seeds) != len(prompts):
        raise UserError(f"got {len(seeds)} seeds for {len(prompts)} prompts; give one seed, or one for each prompt")
    return list(prompts), seeds


def _sigmas(settings: SamplingDefaults) -> Tensor:
    return karras_sigmas(settings.num_steps, settings.sigma_min, settings.sigma_max, settings.rho)
