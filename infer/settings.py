"""The settings of a generation: what is given in place of the checkpoint's defaults, checked before long work."""

import dataclasses
import math
from dataclasses import replace
from typing import Any

from megadit.infer.samplers import STOCHASTIC, find_sampler
from megadit.infer.schedules import find_schedule, resolution_shift, settings_sigmas
from megadit.models.bundle.bundle import SamplingDefaults
from megadit.models.config import DiTConfig
from megadit.models.shared.errors import UserError, nearest
from megadit.models.tokenizers import VideoTokenizer

AUTO = "auto"
"""As `shift`: the one that suits the resolution (see `resolution_shift`)."""
MOST_TOKENS = 1 << 24
"""Of one video: a limit against slips of the pen, far above what fits any machine."""
_OF_SCHEDULE = ("num_steps", "schedule", "sigma_min", "sigma_max", "rho")
_FAR = 2.0
"""Times more or fewer tokens than the defaults' from which on a shape is called far from training."""


def resolve_settings(
    defaults: SamplingDefaults, *, trained: SamplingDefaults | None = None, **given: Any
) -> SamplingDefaults:
    """The defaults with what is given (and not None) in their place; `trained` are the checkpoint's, where it has
    others.

    Raises:
        UserError: for an unknown name, and for a value that no video can have.
    """
    given = {name: _plain(value) for name, value in given.items() if value is not None}
    for name in given.keys() - {field.name for field in dataclasses.fields(defaults)}:
        near = nearest(name, [field.name for field in dataclasses.fields(defaults)])
        raise UserError(f"unknown setting {name!r}" + (f"; did you mean {near!r}?" if near else ""))
    if given.get("shift") == AUTO:
        size, usual = {"height": defaults.height, "width": defaults.width} | given, trained or defaults
        given["shift"] = resolution_shift(size["height"] * size["width"], usual.height * usual.width)
    if "sampler" in given and find_sampler(given["sampler"]) not in STOCHASTIC:
        defaults = replace(defaults, churn=0.0, eta=0.0)  # noise belongs to the sampler that it was chosen for
    schedule = {name: getattr(defaults, name) for name in _OF_SCHEDULE}
    if any(given.get(name, usual) != usual for name, usual in schedule.items()):
        defaults = replace(defaults, sigmas=())  # levels of the defaults stand for a schedule that is not asked for
    settings = replace(defaults, **given)
    settings = replace(settings, sampler=find_sampler(settings.sampler), schedule=find_schedule(settings.schedule))
    sigmas = settings_sigmas(settings)
    if settings.sigmas:
        settings = replace(settings, num_steps=len(sigmas) - 1)
    _check_together(settings)
    return settings


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_together(settings: SamplingDefaults) -> None:
    if settings.num_frames > 1 and not settings.fps > 0:
        raise UserError(f"fps={settings.fps} must be greater than 0")
    if (settings.churn or settings.eta) and settings.sampler not in STOCHASTIC:
        able = ", ".join(STOCHASTIC)
        raise UserError(
            f"sampler {settings.sampler} cannot add noise: leave out churn and eta, or choose one of {able}"
        )
    if bool(settings.second_prompt) != bool(settings.second_guidance):
        raise UserError("second_prompt and second_guidance go together: give both, or neither")
    if settings.autoguidance and settings.negative_prompt:
        raise UserError("autoguidance takes the place of the negative prompt: give one of them")
    if settings.autoguidance and settings.guidance == 1:
        raise UserError("autoguidance needs a guidance other than 1, which is none")


def latent_size(
    settings: SamplingDefaults, config: DiTConfig, tokenizer: VideoTokenizer
) -> tuple[int, tuple[int, int, int, int]]:
    """Frames that the latents decode to (at least `settings.num_frames`), and the latents' shape (C, T, H, W).

    Raises:
        UserError: if tokenizer and patch together cannot divide height or width (names the nearest sizes they can),
            or for a video beyond any machine.
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
    num_tokens = math.prod(config.token_grid(*shape[1:]))
    if num_tokens > MOST_TOKENS:
        size = f"{settings.num_frames} frames of {settings.height}x{settings.width}"
        raise UserError(f"{size} are {num_tokens:,} video tokens, more than the {MOST_TOKENS:,} that are possible")
    return frames, shape


def far_from_training(
    settings: SamplingDefaults, defaults: SamplingDefaults, config: DiTConfig, tokenizer: VideoTokenizer
) -> str | None:
    """A warning where a video has far more or fewer tokens along an axis than the checkpoint's default; else None."""

    def grid(settings: SamplingDefaults) -> tuple[int, int, int]:
        return config.token_grid(*latent_size(settings, config, tokenizer)[1][1:])

    asked, usual = grid(settings), grid(defaults)
    is_image = settings.num_frames == 1
    far = [
        name
        for name, a, b in zip(("frames", "height", "width"), asked, usual, strict=True)
        if not 1 / _FAR <= a / b <= _FAR and not (name == "frames" and is_image)
    ]
    if not far:
        return None
    sizes = f"{settings.num_frames} frames of {settings.height}x{settings.width}"
    trained = f"{defaults.num_frames} frames of {defaults.height}x{defaults.width}"
    return f"{sizes} are far from what this checkpoint makes by default, {trained} ({', '.join(far)}): expect less"
