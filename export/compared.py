"""Sizes of the inputs with which exported networks are compared: those of a profile, reduced where slow."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch

from megadit.export.signatures import Profiles
from megadit.infer.generate.memory_plan import Choices, plan_memory
from megadit.infer.runtimes.network_spec import NetworkSpec
from megadit.models.bundle import Bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.flops import forward_flops
from megadit.models.machine import free_memory
from megadit.models.packing.segments import Grid, Segment
from megadit.models.shared.resources import check_memory_fits
from megadit.models.tokenizers import VideoTokenizer

MOST_PIXELS = 1 << 20
"""Maximum pixels of all frames that an autoencoder processes at once."""
MOST_NUMBERS = 1 << 25
"""Maximum tokens times width in one function evaluation of a denoiser."""
MOST_FLOPS = 1 << 41
"""Maximum operations of one: half a minute of a core in float32, and several times as long in float16."""
_SHARES = [step / 32 for step in range(32, -1, -1)]
"""Interpolation factors from the smallest size of a profile (0, always compared) to the best one (1)."""


def compared_defaults(bundle: Bundle, profiles: Profiles, tokenizer: VideoTokenizer) -> SamplingSettings:
    """The bundle's defaults with the size of the comparison video: the best of the profile, reduced in proportion if
    large.
    """
    config, side = bundle.config, tokenizer.spatial_compression * bundle.config.patch_spatial
    steps = (tokenizer.temporal_compression * config.patch_temporal, side, side)
    ranges, sizes = [profiles.frames, profiles.height, profiles.width], []
    for share in _SHARES:
        sizes = [_between(low, best, step, share) for (low, best, _), step in zip(ranges, steps, strict=True)]
        latents = tokenizer.latent_shape(*sizes)[1:]
        is_large = _is_large(config, config.num_tokens(*latents), config.token_grid(*latents), num_samples=2)
        if not is_large and prod(sizes) <= MOST_PIXELS:
            break
    return replace(bundle.defaults, **dict(zip(("num_frames", "height", "width"), sizes, strict=True)))


def compared_sizes(spec: NetworkSpec, sizes: Mapping[str, int], config: NetworkConfig, pixels: int) -> dict[str, int]:
    """`sizes` of dynamic axes, reduced in proportion if a call would be large; `pixels` are those of a latent."""
    names, found = [name for name in sizes if name != "text"], {}
    most = MOST_PIXELS // (pixels if spec.name == "video_decoder" else 1)
    for share in _SHARES:
        found = {name: _between(spec.axes[name].min, sizes[name], spec.axes[name].step, share) for name in names}
        if spec.is_denoiser:
            sides = {name: found[name] // spec.axes[name].step for name in ("time", "height", "width") if name in found}
            num_samples = prod(found[name] for name in names if name not in sides)
            grid = (1,) * (3 - len(sides)) + tuple(sides.values())
            is_large = _is_large(config, prod(grid), grid, num_samples, sizes.get("text", 0))
        else:
            is_large = prod(found.values()) > most
        if not is_large:
            break
    return {**sizes, **found}


def _is_large(config: NetworkConfig, num_tokens: int, grid: Grid, num_samples: int, text_length: int = 0) -> bool:
    """Whether a function evaluation with samples of so many tokens, in this grid, takes long, or much memory."""
    if num_samples * num_tokens * _width(config) > MOST_NUMBERS:
        return True
    is_counted = isinstance(config, DiTConfig)
    return is_counted and num_samples * forward_flops(Segment(grid, text_length), config) > MOST_FLOPS


def check_compared(bundle: Bundle, settings: SamplingSettings, tokenizer: VideoTokenizer) -> None:
    """Raises UserError if the smallest comparison video needs far more memory than this machine has."""
    choices = Choices(dtype=torch.float32, num_videos=1)
    needed = plan_memory(bundle, settings, tokenizer, bundle.load_text_encoder(), choices).peak
    size = f"{settings.num_frames} frames of {settings.height}x{settings.width}"
    remedy = "export for smaller sizes (--profile), or on a machine with more memory"
    check_memory_fits(needed, free_memory(torch.device("cpu")), f"comparing a video of {size}", remedy)


def fitted_defaults(bundle: Bundle, profiles: Profiles) -> tuple[SamplingSettings, str | None]:
    """The bundle's defaults, with the best size of the profile if their own is outside it, and a note about that.

    A service warms up with its defaults, so their size must be exported.
    """
    fields, names = ("num_frames", "height", "width"), ("frames", "height", "width")
    own, limits = [getattr(bundle.defaults, field) for field in fields], [getattr(profiles, name) for name in names]
    outside = [
        f"{name} {size}"
        for name, size, (low, _, high) in zip(names, own, limits, strict=True)
        if not low <= size <= high
    ]
    if not outside:
        return bundle.defaults, None
    fitted = replace(bundle.defaults, **dict(zip(fields, (best for _, best, _ in limits), strict=True)))
    made = f"{fitted.num_frames} frames of {fitted.height}x{fitted.width}"
    return fitted, (
        f"NOTE: --profile leaves out the bundle's own {', '.join(outside)}: OUT makes {made} by default, or what "
        "--default says"
    )


def _between(low: int, high: int, step: int, share: float) -> int:
    """An admitted size, at a fraction between `low` and `high`."""
    return high if share == 1 else low + int((high - low) * share) // step * step


def _width(config: NetworkConfig) -> int:
    return getattr(config, "hidden_size", 1024)
