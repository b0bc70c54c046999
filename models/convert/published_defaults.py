"""Default sampling settings of published networks: those of their publishers' commands."""

from dataclasses import replace
from typing import Any

from megadit.models.configs.config import DiTConfig
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.convert.published import Published
from megadit.models.convert.schedulers import scheduler_settings
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.tokenizers import VideoTokenizer

WAN_NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，"
    "多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，"
    "倒着走"
)
"""Wan's negative prompt: garish colours, overexposed, still, blurred, subtitles, worst quality, bad hands, ..."""
COSMOS_NEGATIVE = (
    "The video captures a series of frames showing ugly scenes, static with no motion, motion blur, "
    "over-saturation, shaky footage, low resolution, grainy texture, pixelated images, poorly lit areas, "
    "underexposed and overexposed scenes, poor color balance, washed out colors, choppy sequences, jerky movements, "
    "low frame rate, artifacting, color banding, unnatural transitions, outdated special effects, fake elements, "
    "unconvincing visuals, poorly edited content, jump cuts, visual noise, and flickering. Overall, the video is of "
    "poor quality."
)
"""Negative prompt of Cosmos 1.0, Predict2 and 2.5, the default in diffusers' pipelines."""
WAN_SETTINGS = {
    # channels, width, conditioning mode, two experts: (frames, height, width, frames per second, steps, guidance,
    # guidance of the low-noise expert, shift)
    (16, 1536, "tokens", False): (81, 480, 832, 16.0, 50, 6.0, 0.0, 8.0),
    (16, 5120, "tokens", False): (81, 720, 1280, 16.0, 50, 5.0, 0.0, 5.0),
    (16, 5120, "channels", False): (81, 720, 1280, 16.0, 40, 5.0, 0.0, 5.0),
    (16, 5120, "tokens", True): (81, 720, 1280, 16.0, 40, 4.0, 3.0, 12.0),
    (16, 5120, "channels", True): (81, 720, 1280, 16.0, 40, 3.5, 3.5, 5.0),
    (48, 3072, "tokens", False): (121, 704, 1280, 24.0, 50, 5.0, 0.0, 5.0),
}
"""Sampling defaults of Wan 2.1 1.3B, 14B and 14B image-to-video, 2.2's 14B experts and 5B, from their publications."""


def published_defaults(published: Published, tokenizer: VideoTokenizer) -> SamplingSettings:
    """Sampler, noise levels, guidance and size, in our convention: a guidance of 1 is no guidance.

    Raises:
        UserError: if the pipeline's scheduler is not supported.
    """
    config = published.config
    if config.task != "denoise":
        return of_classifier(config, tokenizer)
    kind = kind_of(config, projects_text=bool(published.text_projection))
    return replace(_usual(published, tokenizer), **scheduler_settings(kind, published.scheduler))


def kind_of(config: NetworkConfig, *, projects_text: bool) -> str:
    """The family, or a variant that is published with another scheduler; `projects_text` means Predict2.5."""
    if config.family != "cosmos":
        return config.family
    if projects_text:
        return "cosmos2_5"
    return "cosmos1" if config.parameterization == "edm" else "cosmos2"


def _usual(published: Published, tokenizer: VideoTokenizer) -> SamplingSettings:
    config = published.config
    if config.family == "dit":
        return _of_classes((published.sample_size or 32) * tokenizer.spatial_compression)
    if config.family == "wan":
        return _of_wan(published)
    if config.family == "stable_diffusion":
        return _of_stable_diffusion(published, published.sample_size * tokenizer.spatial_compression)
    return SamplingSettings(**_of_cosmos(published), negative_prompt=COSMOS_NEGATIVE)


def of_classifier(config: DiTConfig, tokenizer: VideoTokenizer) -> SamplingSettings:
    """Settings of a network without sampling: the size of its input."""
    frames, height, width = config.learned_positions
    side = config.patch_spatial * tokenizer.spatial_compression
    return SamplingSettings(
        num_steps=1,
        guidance=1.0,
        num_frames=frames * config.patch_temporal,
        height=height * side,
        width=width * side,
        fps=0.0,
    )


def _of_classes(side: int) -> SamplingSettings:
    return SamplingSettings(
        sampler="euler",
        schedule="ddpm",
        num_steps=50,
        guidance=4.0,
        num_frames=1,
        height=side,
        width=side,
        fps=0.0,
        sigma_min=0.01,
        sigma_max=157.4,
    )


def _of_stable_diffusion(published: Published, side: int) -> SamplingSettings:
    """Defaults of diffusers' pipelines, with DDIM's steps, a single-step sampler."""
    return SamplingSettings(
        sampler="euler",
        schedule="stable_diffusion",
        num_steps=50,
        guidance=7.5 if published.config.pooled_size is None else 5.0,
        num_frames=1,
        height=side,
        width=side,
        fps=0.0,
        sigma_min=0.0292,
        sigma_max=14.6147,
    )


def _of_cosmos(published: Published) -> dict[str, Any]:
    """Sampling defaults of Cosmos, whose guidance of 7 means cond + 7 (cond - uncond)."""
    of_videos = {"guidance": 8.0, "num_frames": 93, "height": 704, "width": 1280, "fps": 16.0}
    if published.text_projection:  # Predict2.5, by diffusers' pipeline and the scheduler that its conversion writes
        return of_videos | {"sampler": "unipc", "num_steps": 36, "sigma_min": 0.01, "sigma_max": 200.0}
    if published.config.parameterization == "edm":
        return of_videos | {"num_steps": 35, "num_frames": 121, "fps": 24.0}
    of_predict2 = of_videos | {"sampler": "res_2ab", "num_steps": 35}
    if published.config.conditioning_sigma is not None:  # its video-to-world
        return of_predict2
    return of_predict2 | {"num_frames": 1, "height": 768, "width": 1360}


def _of_wan(published: Published) -> SamplingSettings:
    config, usual = published.config, WAN_SETTINGS[16, 1536, "tokens", False]
    kind = (config.in_channels, config.hidden_size, config.conditioning_mode, published.low_noise is not None)
    num_frames, height, width, fps, num_steps, guidance, low_guidance, shift = WAN_SETTINGS.get(kind, usual)
    return SamplingSettings(
        sampler="unipc_bh2",
        schedule="wan" if published.is_released else "wan_diffusers",
        sigma_max=999.0,
        num_steps=num_steps,
        guidance=guidance,
        low_guidance=low_guidance,
        shift=shift,
        num_frames=num_frames,
        height=height,
        width=width,
        fps=fps,
        negative_prompt=WAN_NEGATIVE,
    )
