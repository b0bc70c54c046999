"""Sampling that starts from a given video: made anew in part (video-to-video), or continued.

Shapes: B batch, C latent channels, T/H/W latent frames/height/width.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from megadit.infer.samplers import Denoise
from megadit.models.settings import SamplingSettings
from megadit.models.shared.errors import UserError
from megadit.models.tokenizers import VideoTokenizer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GivenVideo:
    """A video or image that a generation starts from; resized where the size differs.

    Raises:
        UserError: unless exactly one of `strength` and `keep_frames` is given, within its range.
    """

    frames: np.ndarray
    """uint8 THWC."""
    strength: float | None = None
    """Video-to-video: the share of the steps that is done again, from the given video with that much noise."""
    keep_frames: int | None = None
    """Continuation: the given video's last so many frames (rounded down to what the tokenizer can encode) become the
    first ones, and the rest is made to follow."""

    def __post_init__(self) -> None:
        if self.frames.dtype != np.uint8 or self.frames.ndim != 4 or self.frames.shape[-1] != 3:
            raise UserError(f"frames must be uint8 [T, H, W, 3], got {self.frames.dtype} {list(self.frames.shape)}")
        if (self.strength is None) == (self.keep_frames is None):
            raise UserError("say what to do with the given video: strength, or keep_frames")
        if self.strength is not None and not 0 < self.strength <= 1:
            raise UserError(f"strength={self.strength} must be greater than 0 and at most 1")
        if self.keep_frames is not None and self.keep_frames < 1:
            raise UserError(f"keep_frames={self.keep_frames} must be at least 1")


@dataclass(frozen=True, slots=True)
class Start:
    """Latents that a generation knows beforehand."""

    latents_1CTHW: Tensor
    num_kept: int
    """Latent frames, the first ones, that stay as they are; 0 where all are made again."""

    def initial_state(self, sigma: float, noise_BCTHW: Tensor) -> Tensor:
        """x = known latents + sigma noise, float64 BCTHW; zeros are known of the frames to come."""
        T = noise_BCTHW.shape[2]
        latents = F.pad(self.latents_1CTHW, (0, 0, 0, 0, 0, T - self.latents_1CTHW.shape[2]))
        return latents.double() + sigma * noise_BCTHW.double()

    def replaces(self, denoise: Denoise) -> Denoise:
        """The same denoiser, which however knows the kept frames.

        With D = x0 there, every solver keeps them on x = x0 + sigma noise: what training saw of such frames.
        """
        if not self.num_kept:
            return denoise
        kept = self.latents_1CTHW[:, :, : self.num_kept]

        def replaced(x: Tensor, sigma_B: Tensor) -> Tensor:
            x0 = denoise(x, sigma_B)
            return torch.cat([kept.expand(len(x0), -1, -1, -1, -1), x0[:, :, self.num_kept :]], dim=2)

        return replaced


def remaining_sigmas(sigmas: Tensor, strength: float | None) -> Tensor:
    """The last levels of a schedule [steps + 1]: the share `strength` of its steps, and at least one."""
    if strength is None:
        return sigmas
    num_steps = len(sigmas) - 1
    return sigmas[num_steps - max(1, round(strength * num_steps)) :]


def check_given(given: GivenVideo, settings: SamplingSettings, tokenizer: VideoTokenizer) -> None:
    """Raises UserError if a given video has too few frames, or leaves none to be made."""
    _chosen_frames(given, settings, tokenizer, frames=settings.num_frames)


def encode_start(
    given: GivenVideo, settings: SamplingSettings, tokenizer: VideoTokenizer, frames: int, device: torch.device
) -> Start:
    """The latents of a given video, where the generated one decodes to `frames` frames.

    Raises:
        UserError: if it has too few frames, or leaves none to be made.
    """
    chosen = np.ascontiguousarray(_chosen_frames(given, settings, tokenizer, frames))
    video = torch.from_numpy(chosen).to(device).float() / 127.5 - 1
    video_TcHW = rearrange(video, "T H W c -> T c H W")
    if video_TcHW.shape[2:] != (settings.height, settings.width):
        size = (settings.height, settings.width)
        video_TcHW = F.interpolate(video_TcHW, size=size, mode="bilinear", antialias=True, align_corners=False)
    latents_1CTHW = tokenizer.encode(rearrange(video_TcHW, "T c H W -> 1 c T H W")).float()
    return Start(latents_1CTHW, num_kept=0 if given.strength is not None else latents_1CTHW.shape[2])


def _chosen_frames(given: GivenVideo, settings: SamplingSettings, tokenizer: VideoTokenizer, frames: int) -> np.ndarray:
    """The frames of a given video that matter."""
    if given.strength is not None:
        return _lengthened(given.frames, settings.num_frames, frames)
    num_frames = _encodable(min(given.keep_frames, len(given.frames)), tokenizer)
    if num_frames >= settings.num_frames:
        raise UserError(f"keep_frames={given.keep_frames} leaves nothing to make of {settings.num_frames} frames")
    return given.frames[len(given.frames) - num_frames :]


def _encodable(frames: int, tokenizer: VideoTokenizer) -> int:
    """The largest number of frames, at most `frames`, that can be encoded."""
    if not tokenizer.causal:
        raise UserError("only a causal tokenizer's videos can be continued: its latents know no later frame")
    covering = tokenizer.frames_covering(frames)
    return covering if covering == frames else covering - tokenizer.temporal_compression


def _lengthened(video: np.ndarray, wanted: int, frames: int) -> np.ndarray:
    """The first `wanted` frames, the last of them repeated up to `frames`.

    Raises:
        UserError: if there are fewer than `wanted`.
    """
    if len(video) < wanted:
        raise UserError(f"the given video has {len(video)} frames, {wanted} are wanted: set num_frames to at most that")
    return np.concatenate([video[:wanted], np.repeat(video[wanted - 1 : wanted], frames - wanted, axis=0)])
