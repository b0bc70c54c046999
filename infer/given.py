"""What a user gives of a video: frames, clips, a mask; and how sampling takes it.

A network that was trained for a use (`train/data/given.py`) sees what is given as clean tokens (`Given`). Another can
only be held to it while sampling: it is told of a noisy video, in which known parts are put back at every step.

Shapes: B batch, C latent channels, T/H/W latent frames/height/width (frames/height/width of a video).
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor

from megadit.infer.resolve import latent_size
from megadit.infer.samplers import Denoise
from megadit.models.conditioning import Given
from megadit.models.config import DiTConfig
from megadit.models.settings import SamplingSettings
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.tokenizers import VideoTokenizer

REMAKE = "remake"
"""Video-to-video: the whole of a video with noise added, from which the last steps are done again."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GivenVideo:
    """A video or image, and what it is of the generated one; resized where the size differs.

    Raises:
        UserError: for frames of another kind, an unknown use, or a use that lacks what it needs.
    """

    frames: np.ndarray
    """uint8 THWC."""
    use: str = ""
    """One of `USES`; "" where `strength` or `keep_frames` says it."""
    strength: float | None = None
    """Of video-to-video: the share of the steps that is done again, from the given video with that much noise."""
    keep_frames: int | None = None
    """The given video's last so many frames become the first ones (`prefix`), its first ones the last (`suffix`);
    rounded down to what the tokenizer can encode."""
    frame: int | None = None
    """Of a `keyframe`: which frame it is."""
    mask: np.ndarray | None = None
    """Of `inpaint`: bool THW, or 1HW for all frames; True where the video is made anew."""

    def __post_init__(self) -> None:
        if self.frames.dtype != np.uint8 or self.frames.ndim != 4 or self.frames.shape[-1] != 3:
            raise UserError(f"frames must be uint8 [T, H, W, 3], got {self.frames.dtype} {list(self.frames.shape)}")
        if not self.use:
            if (self.strength is None) == (self.keep_frames is None):
                raise UserError("say what to do with the given video: strength, or keep_frames")
            object.__setattr__(self, "use", "prefix" if self.strength is None else REMAKE)
        choose_one(self.use, USES, f"{self.use!r} is no use of a given video")
        for use, name in ((REMAKE, "strength"), ("keyframe", "frame"), ("inpaint", "mask")):
            if (self.use == use) != (getattr(self, name) is not None):
                raise UserError(f"{name} goes with use={use}, and with no other: got use={self.use}")
        if self.strength is not None and not 0 < self.strength <= 1:
            raise UserError(f"strength={self.strength} must be greater than 0 and at most 1")
        if self.keep_frames is not None and self.keep_frames < 1:
            raise UserError(f"keep_frames={self.keep_frames} must be at least 1")
        if self.mask is not None and (self.mask.dtype != bool or self.mask.ndim != 3):
            raise UserError(f"a mask must be bool [T, H, W], got {self.mask.dtype} {list(self.mask.shape)}")


@dataclass(frozen=True, slots=True)
class Known:
    """What a generation knows beforehand of the videos of a batch, in the same places of all."""

    latents_BCTHW: Tensor
    """float32, of the videos; zeros where nothing is known."""
    is_kept_THW: Tensor
    """bool: the latents that stay as they are."""
    given: Given | None = None
    """What the network sees clean; None: it was not trained to."""

    def initial_state(self, sigma: float, noise_BCTHW: Tensor) -> Tensor:
        """x = known latents + sigma noise, float64 BCTHW."""
        return self.latents_BCTHW.double() + sigma * noise_BCTHW.double()

    def replaces(self, denoise: Denoise) -> Denoise:
        """The same denoiser, which however knows what is kept.

        With D = x0 there, every solver keeps it on x = x0 + sigma noise: what training saw of such videos.
        """
        if not self.is_kept_THW.any():
            return denoise
        return lambda x, sigma_B: torch.where(self.is_kept_THW, self.latents_BCTHW, denoise(x, sigma_B))


def remaining_sigmas(sigmas: Tensor, strength: float | None) -> Tensor:
    """The last levels of a schedule [steps + 1]: the share `strength` of its steps, and at least one."""
    if strength is None:
        return sigmas
    num_steps = len(sigmas) - 1
    return sigmas[num_steps - max(1, round(strength * num_steps)) :]


def strength_of(media: Iterable[GivenVideo]) -> float | None:
    """That of video-to-video; None where nothing is made from a whole video."""
    return next((medium.strength for medium in media if medium.use == REMAKE), None)


def common_strength(all_media: Iterable[Sequence[GivenVideo]]) -> float | None:
    """The strength of videos that share their noise levels.

    Raises:
        UserError: if they differ.
    """
    strengths = {strength_of(media) for media in all_media}
    if len(strengths) > 1:
        raise UserError(f"videos that are made together need one strength, got {', '.join(map(str, strengths))}")
    return next(iter(strengths), None)


# ------------------------------------------------------------------------------------------------------------- uses


class Target(NamedTuple):
    """The video to be made."""

    settings: SamplingSettings
    covering: int
    """Frames that its latents decode to: at least as many as are asked for."""
    shape: tuple[int, int, int, int]
    """Of its latents, (C, T, H, W)."""
    tokenizer: VideoTokenizer

    @classmethod
    def of(cls, settings: SamplingSettings, config: DiTConfig, tokenizer: VideoTokenizer) -> "Target":
        """Raises UserError for a size that cannot be made; see `latent_size`."""
        return cls(settings, *latent_size(settings, config, tokenizer), tokenizer)

    @property
    def num_frames(self) -> int:
        return self.settings.num_frames

    @property
    def latent_frames(self) -> int:
        return self.shape[1]

    def time_of(self, frame: int) -> float:
        """When a frame is, in latent frames: a causal tokenizer's latent t ends with frame t * compression."""
        return frame / self.tokenizer.temporal_compression


class Source(NamedTuple):
    """What is encoded of a medium, and where its latents go."""

    frames_THWC: np.ndarray
    first: int | None
    """The latent frame of the video at which they begin; None: they are given besides it, at `times`."""
    times: tuple[float, ...] = ()
    skipped: int = 0
    """Latent frames that are left out at their beginning."""


def _first_frame(medium: GivenVideo, target: Target) -> Source:
    _encodable(1, target.tokenizer)  # refuses tokenizers that are not causal
    return Source(medium.frames[:1], 0)


def _prefix(medium: GivenVideo, target: Target) -> Source:
    asked = len(medium.frames) if medium.keep_frames is None else medium.keep_frames
    num_frames = _encodable(min(asked, len(medium.frames)), target.tokenizer)
    if num_frames >= target.num_frames:
        raise UserError(f"keep_frames={asked} leaves nothing to make of {target.num_frames} frames")
    return Source(medium.frames[len(medium.frames) - num_frames :], 0)


def _suffix(medium: GivenVideo, target: Target) -> Source:
    """Its latents depend on frames before it, which are not known: its first one stands for them."""
    asked = len(medium.frames) if medium.keep_frames is None else medium.keep_frames
    compression = target.tokenizer.temporal_compression
    count = min(asked, len(medium.frames)) // compression
    if not count:
        raise UserError(f"the end of a video must be given by at least {compression} frames, got {len(medium.frames)}")
    if count >= target.latent_frames:
        raise UserError(f"keep_frames={asked} leaves nothing to make of {target.num_frames} frames")
    frames = medium.frames[: count * compression]
    before = np.repeat(frames[:1], target.covering - len(frames), axis=0)
    first = target.latent_frames - count
    return Source(np.concatenate([before, frames]), first, skipped=first)


def _last_frame(medium: GivenVideo, target: Target) -> Source:
    return Source(medium.frames[-1:], None, (target.time_of(target.num_frames - 1),))


def _keyframe(medium: GivenVideo, target: Target) -> Source:
    if not 0 <= medium.frame < target.num_frames:
        raise UserError(f"keyframe {medium.frame}: the video has the frames 0 to {target.num_frames - 1}")
    if medium.frame == 0:
        return _first_frame(medium, target)
    return Source(medium.frames[:1], None, (target.time_of(medium.frame),))


def _whole(medium: GivenVideo, target: Target) -> Source:
    return Source(_lengthened(medium.frames, target.num_frames, target.covering), 0)


def _edit(medium: GivenVideo, target: Target) -> Source:
    frames = _lengthened(medium.frames, target.num_frames, target.covering)
    return Source(frames, None, tuple(map(float, range(target.latent_frames))))


USES: dict[str, Callable[[GivenVideo, Target], Source]] = {
    "first_frame": _first_frame,
    "last_frame": _last_frame,
    "keyframe": _keyframe,
    "prefix": _prefix,
    "suffix": _suffix,
    "inpaint": _whole,
    "edit": _edit,
    REMAKE: _whole,
}
"""What a given video can be of the generated one."""


Media = tuple[GivenVideo, ...]
"""All that is given of one video."""


AnyGiven = GivenVideo | Media | list[GivenVideo | Media | None] | None
"""What is given of all videos of a generation; a list has an entry for each."""


def media_of(given: AnyGiven, count: int) -> list[Media]:
    """What is given of each of `count` videos: a list has an entry for each, anything else is given of all.

    Raises:
        UserError: for a list of another length.
    """
    entries = given if isinstance(given, list) else [given] * count
    if len(entries) != count:
        raise UserError(f"got what is given of {len(entries)} of {count} videos; give it once, or for each prompt")
    return [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries]


def structure_of(media: Media, target: Target) -> tuple[Any, ...]:
    """Equal for videos of which the same places are given: these can share a batch."""
    sources = [USES[medium.use](medium, target) for medium in media]
    masks = [None if medium.mask is None else (medium.mask.shape, medium.mask.tobytes()) for medium in media]
    places = [(len(source.frames_THWC), *source[1:]) for source in sources]
    return tuple(zip((medium.use for medium in media), places, masks, strict=True))


def num_extra_frames(media: Media, target: Target) -> int:
    """Latent frames that are given of a video besides its own."""
    return sum(len(USES[medium.use](medium, target).times) for medium in media)


def _trained_as(use: str, frame: int | None) -> str:
    """The use of training (`train/data/given.py`) that a use here is."""
    if use == "keyframe":
        return "keyframes" if frame else "first_frame"
    return use


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


# --------------------------------------------------------------------------------------------------------- encoding


def check_given(media: Sequence[GivenVideo], takes: Collection[str], target: Target) -> None:
    """What can be found wrong before anything is encoded.

    `takes` are the uses that the network was trained for.

    Raises:
        UserError: for media that do not fit the video or each other, and uses that the network cannot take.
    """
    if len(media) > 1 and strength_of(media) is not None:
        raise UserError("strength makes a whole video anew: give nothing else beside it")
    sources = [USES[medium.use](medium, target) for medium in media]
    needs_training = any(source.first is None for source in sources)
    for medium in media:
        trained_as = _trained_as(medium.use, medium.frame)
        if needs_training and trained_as not in takes:
            known = f"; it takes {', '.join(sorted(takes))}" if takes else "; it takes nothing"
            raise UserError(f"this checkpoint was not trained to be given {trained_as} (data.given){known}")
        if medium.mask is not None and len(medium.mask) not in (1, len(medium.frames)):
            raise UserError(
                f"the mask has {len(medium.mask)} frames, the video {len(medium.frames)}; give 1 or as many"
            )
        if medium.mask is not None and not medium.mask.any():
            raise UserError("the mask marks nothing to make anew: white is what is made, black is what stays")


def encode_batch(all_media: Sequence[Media], encode: Callable[[Media], Known | None]) -> Known | None:
    """What is known of videos of one structure, of which `encode` gives each, once for the same media."""
    found = {media: encode(media) for media in dict.fromkeys(all_media)}
    known = [found[media] for media in all_media]
    if known[0] is None:
        return None
    return replace(
        known[0],
        latents_BCTHW=torch.cat([each.latents_BCTHW for each in known]),
        given=Given.concatenate([each.given for each in known]),
    )


def encode_given(
    media: Sequence[GivenVideo],
    takes: Collection[str],
    target: Target,
    device: torch.device,
) -> Known | None:
    """What media, which passed `check_given`, give of one video; None where there are none."""
    if not media:
        return None
    latents_1CTHW = torch.zeros(1, *target.shape, device=device)
    is_kept_THW = torch.zeros(target.shape[1:], dtype=torch.bool, device=device)
    is_seen, extra, times = True, [], []
    for medium in media:
        source = USES[medium.use](medium, target)
        found = _encode(source.frames_THWC, target.settings, target.tokenizer, device)[:, :, source.skipped :]
        is_seen &= source.first is None or _trained_as(medium.use, medium.frame) in takes
        if source.first is None:
            extra.append(found)
            times += source.times
            continue
        place = slice(source.first, source.first + found.shape[2])
        where = _kept(medium, target, device)[place]
        latents_1CTHW[:, :, place] = torch.where(where | (medium.use == REMAKE), found, latents_1CTHW[:, :, place])
        is_kept_THW[place] |= where
    if strength_of(media) is not None or not is_seen:
        return Known(latents_1CTHW, is_kept_THW)
    is_given_THW = torch.cat([is_kept_THW, *(torch.ones_like(part[0, 0], dtype=torch.bool) for part in extra)])
    given = Given(torch.cat([latents_1CTHW, *extra], dim=2), is_given_THW, tuple(times))
    return Known(latents_1CTHW, is_kept_THW, given)


def _encode(
    frames_THWC: np.ndarray, settings: SamplingSettings, tokenizer: VideoTokenizer, device: torch.device
) -> Tensor:
    """Latents [1, C, T, H, W], float32."""
    video = torch.from_numpy(np.ascontiguousarray(frames_THWC)).to(device).float() / 127.5 - 1
    video_TcHW = rearrange(video, "T H W c -> T c H W")
    if video_TcHW.shape[2:] != (settings.height, settings.width):
        size = (settings.height, settings.width)
        video_TcHW = F.interpolate(video_TcHW, size=size, mode="bilinear", antialias=True, align_corners=False)
    return tokenizer.encode(rearrange(video_TcHW, "T c H W -> 1 c T H W")).float()


def _kept(medium: GivenVideo, target: Target, device: torch.device) -> Tensor:
    """bool THW: the latents that stay as they are, if the medium is placed there."""
    T, H, W = target.shape[1:]
    if medium.use != "inpaint":
        return torch.full((T, H, W), medium.use != REMAKE, device=device)
    mask_THW = np.broadcast_to(medium.mask, (len(medium.frames), *medium.mask.shape[1:]))
    mask_THW = _lengthened(mask_THW, target.num_frames, target.covering)
    size = (target.settings.height, target.settings.width)
    is_new = torch.from_numpy(np.ascontiguousarray(mask_THW)).to(device).float()[:, None]
    is_new_THW = F.interpolate(is_new, size=size, mode="area")[:, 0]
    # a latent is made anew if any of its pixels is; the first has one frame, the others `temporal_compression`
    before = -len(is_new_THW) % target.tokenizer.temporal_compression
    padded = torch.cat([is_new_THW[:1].expand(before, -1, -1), is_new_THW])
    assert len(padded) == T * math.ceil(len(padded) / T), "latents cover equally many frames, the first one excepted"
    return reduce(padded, "(T t) (H h) (W w) -> T H W", "max", T=T, H=H, W=W) == 0
