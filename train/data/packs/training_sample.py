"""A training sample.

Shapes: C latent channels, T/H/W latent frames, height, width, K frames, L text tokens, E text feature width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megadit.infer.sampling.samplers import NoisyStep
from megadit.models.diffusion.noise import sample_key
from megadit.models.tokenizers import VideoTokenizer


class Frames(NamedTuple):
    """Frames of a clip that were each encoded as an image."""

    latents_CTHW: Tensor
    """[C, K, H, W]."""
    times: tuple[float, ...]
    """Times of the frames, in latent frames: see `frame_times`."""


def another(name: str, number: int) -> str:
    """Name of a sample's tensor for its caption `number`: text, text/1, text/2."""
    return f"{name}/{number}" if number else name


def drawn_index(kind: str, sample_id: str, occurrence: int, count: int) -> int:
    """Index of the caption, or the state, used in this epoch, drawn by sample and epoch alone."""
    return sample_key(0, f"{kind} of {sample_id}", occurrence) % count


def keyframe_places(num_frames: int, count: int) -> list[int]:
    """Indices of at most `count` frames of a clip, evenly spaced up to the last one, without the first, which the first
    latent frame encodes."""
    return sorted({round(number * (num_frames - 1) / count) for number in range(1, count + 1)} - {0})


def frame_times(places: Sequence[int], tokenizer: VideoTokenizer) -> tuple[float, ...]:
    """Convert indices of frames to latent frames: a causal tokenizer's latent t ends with frame t * compression."""
    return tuple(place / tokenizer.temporal_compression for place in places)


def encode_frames(encode: Callable[[Tensor], Tensor], video_BCTHW: Tensor, places: Sequence[int]) -> Tensor:
    """Encode frames of clips as images: latents [B, C, K, H, W]."""
    return torch.cat([encode(video_BCTHW[:, :, place : place + 1]) for place in places], dim=2)


class State(NamedTuple):
    """Noisy latents in the sampling of a video, and the step that the sampler took from there."""

    latent_CTHW: Tensor
    step: NoisyStep


@dataclass(slots=True)
class TrainingSample:
    """One clip or image, encoded."""

    sample_id: str
    occurrence: int
    """Number of earlier epochs that read this sample."""
    latent_CTHW: Tensor
    text_LE: Tensor
    """Text features, [0, E] without a caption."""
    fps: float
    """Frames per second of the decoded video; 0 for images."""
    height: int = 0
    width: int = 0
    """Size of the decoded video, in pixels."""
    aesthetic_score: float | None = None
    is_prior: bool = False
    """Whether it is a generated sample for prior preservation (`megadit prepare prior`)."""
    seed: int | None = None
    """Seed of a generated video's initial noise."""
    reward: float | None = None
    """Optimality probability of a generated video, 0 to 1 (`megadit prepare rollouts`)."""
    state: State | None = None
    """One state of the sampling of a generated video (`megadit prepare rollouts --states`)."""
    rejected_CTHW: Tensor | None = None
    """Video of the same caption that was liked less (`megadit prepare preferences`), of the same shape."""
    preference: float | None = None
    """Place in a pair: 1 for the chosen video, -1 for the rejected one."""
    reference_CTHW: Tensor | None = None
    """Source clip of an edit, whose instruction is the text (`megadit prepare edits`)."""
    image_text_LE: Tensor | None = None
    """Features of a caption without what the conditioning shows, used with conditioning in place of `text_LE`."""
    frames: Frames | None = None
    """Frames of the clip encoded as images, for conditioning."""

    @property
    def kind(self) -> str:
        return "video" if self.fps else "image"

    @property
    def videos(self) -> "list[TrainingSample]":
        """The chosen and the rejected video of a pair, with the same random draws; else the sample itself."""
        if self.rejected_CTHW is None:
            return [self]
        rejected = replace(self, latent_CTHW=self.rejected_CTHW, rejected_CTHW=None, preference=-1.0)
        return [replace(self, rejected_CTHW=None), rejected]
