"""Conditioning media as latents: latents that sampling keeps, inputs of the network, and image features.

Shapes: B batch, C latent channels, T/H/W latent frames/height/width (frames/height/width of a video), M frames of a
latent, I tokens of an image, E their width.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor

from megadit.infer.conditioning.items import (
    KINDS,
    VIDEO_TO_VIDEO,
    ConditioningItem,
    Media,
    Target,
    lengthened,
    strength_of,
    trained_as,
)
from megadit.infer.sampling.samplers import Denoise
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.diffusion.noise import Stream, latent_noise
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.host_to_device import sent_together
from megadit.models.networks.conditioning import CleanLatents, on_host
from megadit.models.text_encoders.image_encoder import ImageEncoder
from megadit.models.tokenizers import VideoTokenizer


@dataclass(frozen=True, slots=True)
class EncodedConditioning:
    """Conditioning of the videos of a batch, at the same places in all."""

    latents_BCTHW: Tensor
    """Clean latents, float32; zeros where there is no conditioning."""
    is_fixed_THW: Tensor
    """Mask of the latents that sampling keeps, bool."""
    clean: CleanLatents | None = None
    """Conditioning that the network sees; None if it was not trained with it."""
    image_BIE: Tensor | None = None
    """Features of the conditioning images, where the network reads them."""

    def initial_state(self, sigma: float, noise_BCTHW: Tensor, noise_scale: float = 1.0) -> Tensor:
        """Initial state x = known latents + sigma noise, float64 BCTHW; the scale applies where nothing is kept."""
        noise_BCTHW = torch.where(self.is_fixed_THW, noise_BCTHW, noise_scale * noise_BCTHW)
        return self.latents_BCTHW.double() + sigma * noise_BCTHW.double()

    def seen(self, config: NetworkConfig, key_B: Tensor) -> dict[str, Any]:
        """Return the network's conditioning inputs for videos of these keys, whole tokens and noised if it was trained
        that way."""
        clean = self.clean
        if clean is not None and config.conditioning.is_among:
            clean = clean.of_whole_tokens(config)
        if clean is not None and config.conditioning.is_noised:
            clean_BCTHW = clean.latents_BCTHW
            noise_BCTHW = latent_noise(key_B, tuple(clean_BCTHW.shape[1:]), stream=Stream.CONDITIONING_NOISE)
            clean = replace(clean, latents_BCTHW=clean_BCTHW + config.conditioning_noise * noise_BCTHW)
        return {"clean": clean, "image_BIE": self.image_BIE}

    def replaces(self, denoise: Denoise) -> Denoise:
        """Wrap a denoiser: where latents are kept, it returns them.

        With D = x0 there, every solver stays on x = x0 + sigma noise, as in training.
        """
        if not on_host(self.is_fixed_THW).any():
            return denoise
        return lambda x, sigma_B: torch.where(self.is_fixed_THW, self.latents_BCTHW, denoise(x, sigma_B))


def encode_batch(all_media: Sequence[Media], encode: Callable[[Media], EncodedConditioning]) -> EncodedConditioning:
    """Concatenate the conditioning of videos of one structure; `encode` runs once for equal media."""
    found = {media: encode(media) for media in dict.fromkeys(all_media)}
    encoded = [found[media] for media in all_media]
    return replace(
        encoded[0],
        latents_BCTHW=torch.cat([each.latents_BCTHW for each in encoded]),
        clean=CleanLatents.concatenate([each.clean for each in encoded]),
        image_BIE=None if encoded[0].image_BIE is None else torch.cat([each.image_BIE for each in encoded]),
    )


def encode_conditioning(
    media: Sequence[ConditioningItem],
    conditionings: Collection[str],
    target: Target,
    device: torch.device,
    image_encoder: ImageEncoder | None = None,
) -> EncodedConditioning:
    """Encode the media of one video, which passed `check_conditioning`.

    `image_encoder` gives the features of conditioning images to a network that reads them.
    """
    if not target.form.is_among:
        return EncodedConditioning(
            latents_BCTHW=torch.zeros(1, *target.shape, device=device),
            is_fixed_THW=_nothing(target, device),
            clean=_as_channels(media, target, device),
            image_BIE=None if image_encoder is None else _features(media, image_encoder),
        )
    latents_1CTHW = torch.zeros(1, *target.shape, device=device)
    is_fixed_THW = _nothing(target, device)
    is_seen, extra, times = True, [], []
    for medium in media:
        source = KINDS[medium.kind](medium, target)
        found = _encode(source.frames_THWC, target.settings, target.tokenizer, device)[:, :, source.skipped :]
        is_seen &= source.first is None or trained_as(medium.kind, medium.frame) in conditionings
        if source.first is None:
            extra.append(found)
            times += source.times
            continue
        place = slice(source.first, source.first + found.shape[2])
        where = _fixed_mask(medium, target, device)[place]
        latents_1CTHW[:, :, place] = torch.where(
            where | (medium.kind == VIDEO_TO_VIDEO), found, latents_1CTHW[:, :, place]
        )
        is_fixed_THW[place] |= where
    if strength_of(media) is not None or not is_seen:
        return EncodedConditioning(latents_1CTHW, is_fixed_THW)
    is_clean_THW = torch.cat([is_fixed_THW, *(torch.ones_like(part[0, 0], dtype=torch.bool) for part in extra)])
    clean = CleanLatents(torch.cat([latents_1CTHW, *extra], dim=2), is_clean_THW, tuple(times))
    return EncodedConditioning(latents_1CTHW, is_fixed_THW, clean)


def _nothing(target: Target, device: torch.device) -> Tensor:
    """Empty mask of the target's latents, bool THW."""
    return torch.zeros(target.shape[1:], dtype=torch.bool, device=device)


def _features(media: Sequence[ConditioningItem], image_encoder: ImageEncoder) -> Tensor:
    """Features of the conditioning images, concatenated in the order of time: float32 [1, I, E]."""
    in_order = sorted(media, key=lambda medium: medium.kind != "first_frame")
    return torch.cat([image_encoder.encode(medium.frames[0]) for medium in in_order], dim=1)


def _as_channels(media: Sequence[ConditioningItem], target: Target, device: torch.device) -> CleanLatents:
    """Return the conditioning as extra channels: latents of a video that is grey where there is no conditioning, and
    its mask."""
    video_1cTHW = torch.zeros(1, 3, target.covering, target.settings.height, target.settings.width, device=device)
    is_clean_T = torch.zeros(target.covering, dtype=torch.bool, device=device)
    compression = target.tokenizer.temporal_compression
    for medium in media:
        source = KINDS[medium.kind](medium, target)
        first = source.first if source.first is not None else round(source.times[0] * compression)
        place = slice(first, first + len(source.frames_THWC))
        video_1cTHW[:, :, place] = _pixels(source.frames_THWC, target.settings, device)
        is_clean_T[place] = True
    latents_1CTHW = target.tokenizer.encode(video_1cTHW).float()
    # the first latent covers one frame, repeated to the compression of the others
    marks_T = torch.cat([is_clean_T[:1].expand(compression - 1), is_clean_T])
    marks_MTHW = rearrange(marks_T, "(T M) -> M T 1 1", M=compression).expand(-1, -1, *target.shape[2:])
    return CleanLatents(latents_1CTHW, marks_MTHW.any(0), marks_MTHW=marks_MTHW)


def _encode(
    frames_THWC: np.ndarray, settings: SamplingSettings, tokenizer: VideoTokenizer, device: torch.device
) -> Tensor:
    """Latents [1, C, T, H, W], float32."""
    return tokenizer.encode(_pixels(frames_THWC, settings, device)).float()


def _pixels(frames_THWC: np.ndarray, settings: SamplingSettings, device: torch.device) -> Tensor:
    """Pixels, float32 [1, 3, T, H, W], -1..1, resized to the settings."""
    video = _sent(frames_THWC, device).float() / 127.5 - 1
    video_TcHW = rearrange(video, "T H W c -> T c H W")
    if video_TcHW.shape[2:] != (settings.height, settings.width):
        size = (settings.height, settings.width)
        video_TcHW = F.interpolate(video_TcHW, size=size, mode="bilinear", antialias=True, align_corners=False)
    return rearrange(video_TcHW, "T c H W -> 1 c T H W")


def _sent(array: np.ndarray, device: torch.device) -> Tensor:
    return sent_together([torch.from_numpy(np.ascontiguousarray(array))], device)[0]


def _fixed_mask(medium: ConditioningItem, target: Target, device: torch.device) -> Tensor:
    """Mask of the latents that this medium keeps, bool THW."""
    T, H, W = target.shape[1:]
    if medium.kind != "inpaint":
        return torch.full((T, H, W), medium.kind != VIDEO_TO_VIDEO, device=device)
    mask_THW = np.broadcast_to(medium.mask, (len(medium.frames), *medium.mask.shape[1:]))
    mask_THW = lengthened(mask_THW, target.num_frames, target.covering)
    size = (target.settings.height, target.settings.width)
    is_new = _sent(mask_THW, device).float()[:, None]
    is_new_THW = F.interpolate(is_new, size=size, mode="area")[:, 0]
    # a latent is generated if any of its pixels is; the first has one frame, the others `temporal_compression`
    before = -len(is_new_THW) % target.tokenizer.temporal_compression
    padded = torch.cat([is_new_THW[:1].expand(before, -1, -1), is_new_THW])
    assert len(padded) == T * math.ceil(len(padded) / T), "all latents but the first cover equally many frames"
    return reduce(padded, "(T t) (H h) (W w) -> T H W", "max", T=T, H=H, W=W) == 0
