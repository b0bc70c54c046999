"""Resolution of a video's settings: valid noise levels, the size of its latents, and the work that they are."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from megadit.infer.sampling.samplers import num_denoiser_calls
from megadit.infer.sampling.schedules import settings_sigmas
from megadit.models.bundle import Bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.diffusion.settings import SamplingSettings, check_guidance, resolve
from megadit.models.flops import forward_flops
from megadit.models.packing.segments import Segment
from megadit.models.shared.cli.options import read_assignments
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError, nearest_multiples
from megadit.models.tokenizers import VideoTokenizer

MOST_TOKENS = 1 << 24
"""Most tokens of one video: a limit against typing errors, far above what fits any machine."""
_FAR = 2.0
"""Ratio of tokens to the defaults', up or down, from which on a shape counts as far from training."""


def resolve_settings(
    defaults: SamplingSettings, *, trained: SamplingSettings | None = None, **changes: Any
) -> SamplingSettings:
    """Resolve settings as `diffusion.settings.resolve` does; explicit noise levels set the number of steps.

    Raises:
        UserError: for settings that are wrong, by themselves or together, and for invalid noise levels.
    """
    settings = resolve(defaults, trained=trained, **changes)
    num_steps = len(settings_sigmas(settings)) - 1
    return settings if settings.num_steps == num_steps else dataclasses.replace(settings, num_steps=num_steps)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DefaultOptions:
    """Option of commands that write a bundle: changes to its default settings."""

    default: tuple[str, ...] = setting(
        (),
        "default of the bundle, such as num_steps=20, used where a request leaves this setting out; repeat for several",
        repeated=True,
        metavar="NAME=VALUE",
    )


def changed_defaults(
    defaults: SamplingSettings, changes: Sequence[str], config: NetworkConfig, tokenizer: VideoTokenizer
) -> SamplingSettings:
    """A bundle's defaults, overridden by those of `DefaultOptions`.

    Raises:
        UserError: for settings that would be invalid in a request.
    """
    if not changes:
        return defaults
    settings = resolve_settings(defaults, **read_assignments(SamplingSettings, changes))
    if settings.autoguidance:
        raise UserError("autoguidance names a path, which bundles do not store: pass it to each command that generates")
    latent_size(settings, config, tokenizer)
    return settings


def with_changed_defaults(bundle: Bundle, changes: Sequence[str]) -> Bundle:
    """The opened bundle with defaults changed as by `changed_defaults`."""
    defaults = changed_defaults(bundle.defaults, changes, bundle.config, bundle.load_tokenizer())
    return dataclasses.replace(bundle, defaults=defaults, manifest=bundle.manifest | {"defaults": defaults.to_dict()})


def latent_size(
    settings: SamplingSettings, config: NetworkConfig, tokenizer: VideoTokenizer
) -> tuple[int, tuple[int, int, int, int]]:
    """Frames that the latents decode to (at least `settings.num_frames`), and the latents' shape (C, T, H, W).

    Raises:
        UserError: if height or width is no multiple of tokenizer compression times patch size (names the nearest
            valid sizes), for more than `MOST_TOKENS` tokens, and as `settings.check_guidance`.
    """
    check_guidance(settings, config.guidance_embedding_range)
    multiple = tokenizer.spatial_compression * config.patch_spatial
    for name, size in (("height", settings.height), ("width", settings.width)):
        if size % multiple:
            raise UserError(f"{name}={size} is not a multiple of {multiple}; use {nearest_multiples(size, multiple)}")
    frames = tokenizer.frames_covering(settings.num_frames)
    while (shape := tokenizer.latent_shape(frames, settings.height, settings.width))[1] % config.patch_temporal:
        frames = tokenizer.frames_covering(frames + 1)
    num_tokens = config.num_tokens(*shape[1:])
    if num_tokens > MOST_TOKENS:
        size = f"{settings.num_frames} frames of {settings.height}x{settings.width}"
        raise UserError(
            f"{size} are {num_tokens:,} video tokens, more than the limit of {MOST_TOKENS:,}; "
            "make it smaller or shorter"
        )
    return frames, shape


def far_from_training(
    settings: SamplingSettings, defaults: SamplingSettings, config: NetworkConfig, tokenizer: VideoTokenizer
) -> str | None:
    """A warning if a video has far more or fewer tokens along an axis than the checkpoint's default; else None."""

    def grid(settings: SamplingSettings) -> tuple[int, int, int]:
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
    return f"{sizes} are far from this checkpoint's default, {trained} ({', '.join(far)}): expect lower quality"


def num_function_evaluations(settings: SamplingSettings, config: NetworkConfig) -> int:
    """Function evaluations of a video: guidance takes one more a step unless the network is guidance-distilled, and a
    second prompt another; that of conditioning media is not counted."""
    is_guided = settings.guidance + settings.second_guidance != 1 and config.guidance_embedding_range is None
    passes = 1 + is_guided + bool(settings.second_prompt)
    return num_denoiser_calls(settings.sampler, settings_sigmas(settings)) * passes


def video_work(settings: SamplingSettings, config: NetworkConfig, tokenizer: VideoTokenizer) -> int:
    """Work of all function evaluations of a video: floating-point operations, or tokens for a U-Net."""
    _, (_, *sides) = latent_size(settings, config, tokenizer)
    is_counted = isinstance(config, DiTConfig)
    of_one = forward_flops(Segment(config.token_grid(*sides), 1), config) if is_counted else config.num_tokens(*sides)
    return num_function_evaluations(settings, config) * of_one
