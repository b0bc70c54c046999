"""Conditioning media of a video (frames, clips, a mask), the files that options name, and how sampling uses them.

A network that was trained with a conditioning (`train/data/packs/conditioning.py`) sees it as clean tokens
(`CleanLatents`). Any other one sees a noisy video, in which sampling replaces the known latents at every step.

Shapes: B batch, C latent channels, T/H/W latent frames/height/width (frames/height/width of a video).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megadit.infer.sampling.resolve import latent_size
from megadit.models.configs.families import ConditioningMode
from megadit.models.configs.protocol import NetworkConfig
from megadit.models.diffusion.conditioning_settings import KINDS as KIND_OF_OPTION
from megadit.models.diffusion.conditioning_settings import check_conflicts, split_keyframe
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.tokenizers import VideoTokenizer

DEFAULT_STRENGTH = 0.6
DARKEST_WHITE = 128
"""Lowest value of a mask's white pixel, 0..255."""
VIDEO_TO_VIDEO = "remake"
"""Video-to-video (SDEdit): noise is added to a whole video, which is denoised in the last steps of the schedule."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ConditioningItem:
    """A conditioning image or video, and its kind; resized to the video that is generated.

    Raises:
        UserError: for frames of another dtype or shape, an unknown kind, or fields that do not fit the kind.
    """

    frames: np.ndarray
    """uint8 THWC."""
    kind: str = ""
    """One of `KINDS`; "" where `strength` or `keep_frames` implies it."""
    strength: float | None = None
    """Strength of video-to-video, 0..1: the fraction of the schedule's steps that run, starting from this video with
    the noise of that level."""
    keep_frames: int | None = None
    """Number of frames that are kept: the last ones of this video become the first ones (`prefix`), or the first ones
    become the last (`suffix`); rounded down to a number that the tokenizer can encode."""
    frame: int | None = None
    """Frame index of a `keyframe`."""
    mask: np.ndarray | None = None
    """Mask of `inpaint`: bool THW, or 1HW for all frames; True where the video is generated."""

    def __post_init__(self) -> None:
        if self.frames.dtype != np.uint8 or self.frames.ndim != 4 or self.frames.shape[-1] != 3:
            raise UserError(f"frames must be uint8 [T, H, W, 3], got {self.frames.dtype} {list(self.frames.shape)}")
        if not self.kind:
            if (self.strength is None) == (self.keep_frames is None):
                raise UserError("a conditioning video without a kind needs one of strength and keep_frames")
            object.__setattr__(self, "kind", "prefix" if self.strength is None else VIDEO_TO_VIDEO)
        choose_one(self.kind, KINDS, f"conditioning {self.kind!r} is unknown")
        for kind, name in ((VIDEO_TO_VIDEO, "strength"), ("keyframe", "frame"), ("inpaint", "mask")):
            if (self.kind == kind) != (getattr(self, name) is not None):
                raise UserError(f"{name} goes with kind={kind} alone, got kind={self.kind}")
        if self.strength is not None and not 0 < self.strength <= 1:
            raise UserError(f"strength={self.strength} must be greater than 0 and at most 1")
        if self.keep_frames is not None and self.keep_frames < 1:
            raise UserError(f"keep_frames={self.keep_frames} must be at least 1")
        if self.mask is not None and (self.mask.dtype != bool or self.mask.ndim != 3):
            raise UserError(f"a mask must be bool [T, H, W], got {self.mask.dtype} {list(self.mask.shape)}")


def remaining_sigmas(sigmas: Tensor, all_media: Iterable[Sequence[ConditioningItem]]) -> Tensor:
    """The last levels of a schedule [steps + 1]: the fraction `strength` of its steps, at least one.

    Raises:
        UserError: if the strengths of videos differ.
    """
    strength = common_strength(all_media)
    if strength is None:
        return sigmas
    num_steps = len(sigmas) - 1
    return sigmas[num_steps - max(1, round(strength * num_steps)) :]


def strength_of(media: Iterable[ConditioningItem]) -> float | None:
    """Strength of video-to-video; None where no medium has one."""
    return next((medium.strength for medium in media if medium.kind == VIDEO_TO_VIDEO), None)


def common_strength(all_media: Iterable[Sequence[ConditioningItem]]) -> float | None:
    """The strength of videos that share their noise levels.

    Raises:
        UserError: if they differ.
    """
    strengths = {strength_of(media) for media in all_media}
    if len(strengths) > 1:
        raise UserError(f"videos of one batch need the same strength, got {', '.join(map(str, strengths))}")
    return next(iter(strengths), None)


# ------------------------------------------------------------------------------------------------------------ kinds


CHANNEL_FRAMES = {"first_frame": "--image", "last_frame": "--last_image"}
"""Conditionings that networks with extra channels (Wan's) require -> flags of `megadit generate`."""


class Target(NamedTuple):
    """The video to generate."""

    settings: SamplingSettings
    covering: int
    """Frames that its latents decode to: at least `num_frames`."""
    shape: tuple[int, int, int, int]
    """Shape of its latents, (C, T, H, W)."""
    tokenizer: VideoTokenizer
    form: ConditioningMode
    """Mode in which the network is conditioned."""

    @classmethod
    def of(cls, settings: SamplingSettings, config: NetworkConfig, tokenizer: VideoTokenizer) -> "Target":
        """Raises UserError for an invalid size; see `latent_size`."""
        return cls(settings, *latent_size(settings, config, tokenizer), tokenizer, config.conditioning)

    @property
    def num_frames(self) -> int:
        return self.settings.num_frames

    @property
    def latent_frames(self) -> int:
        return self.shape[1]

    def time_of(self, frame: int) -> float:
        """Time of a frame, in latent frames: a causal tokenizer's latent t ends with frame t * compression."""
        return frame / self.tokenizer.temporal_compression


class Source(NamedTuple):
    """Frames of a medium to encode, and the place of their latents."""

    frames_THWC: np.ndarray
    first: int | None
    """Latent frame of the video at which they begin; None for extra conditioning frames, at `times`."""
    times: tuple[float, ...] = ()
    skipped: int = 0
    """Latent frames to drop at the beginning."""


def _first_frame(medium: ConditioningItem, target: Target) -> Source:
    encodable_frames(1, target.tokenizer)  # refuses tokenizers that are not causal
    return Source(medium.frames[:1], 0)


def _prefix(medium: ConditioningItem, target: Target) -> Source:
    asked = len(medium.frames) if medium.keep_frames is None else medium.keep_frames
    num_frames = encodable_frames(min(asked, len(medium.frames)), target.tokenizer)
    if num_frames >= target.num_frames:
        raise UserError(f"keep_frames={asked} leaves none of {target.num_frames} frames to generate")
    return Source(medium.frames[len(medium.frames) - num_frames :], 0)


def _suffix(medium: ConditioningItem, target: Target) -> Source:
    """Place the end of a video; its latents depend on unknown earlier frames, so its first frame is repeated there, and
    its last one where frames are decoded and then cut."""
    asked = len(medium.frames) if medium.keep_frames is None else medium.keep_frames
    num_frames, compression = min(asked, len(medium.frames)), target.tokenizer.temporal_compression
    num_cut = target.covering - target.num_frames
    fewest = compression - num_cut % compression
    if num_frames < fewest:
        raise UserError(f"conditioning on a video's end takes at least {fewest} frames, got {num_frames}")
    count = (num_frames + num_cut) // compression
    if count >= target.latent_frames:
        raise UserError(f"keep_frames={asked} leaves none of {target.num_frames} frames to generate")
    frames = medium.frames[: count * compression - num_cut]
    before = np.repeat(frames[:1], target.num_frames - len(frames), axis=0)
    first = target.latent_frames - count
    whole = lengthened(np.concatenate([before, frames]), target.num_frames, target.covering)
    return Source(whole, first, skipped=first)


def _last_frame(medium: ConditioningItem, target: Target) -> Source:
    return Source(medium.frames[-1:], None, (target.time_of(target.num_frames - 1),))


def _keyframe(medium: ConditioningItem, target: Target) -> Source:
    if not 0 <= medium.frame < target.num_frames:
        raise UserError(f"keyframe {medium.frame}: the video has the frames 0 to {target.num_frames - 1}")
    if medium.frame == 0:
        return _first_frame(medium, target)
    return Source(medium.frames[:1], None, (target.time_of(medium.frame),))


def _whole(medium: ConditioningItem, target: Target) -> Source:
    return Source(lengthened(medium.frames, target.num_frames, target.covering), 0)


def _edit(medium: ConditioningItem, target: Target) -> Source:
    frames = lengthened(medium.frames, target.num_frames, target.covering)
    return Source(frames, None, tuple(map(float, range(target.latent_frames))))


KINDS: dict[str, Callable[[ConditioningItem, Target], Source]] = {
    "first_frame": _first_frame,
    "last_frame": _last_frame,
    "keyframe": _keyframe,
    "prefix": _prefix,
    "suffix": _suffix,
    "inpaint": _whole,
    "edit": _edit,
    VIDEO_TO_VIDEO: _whole,
}
"""Kind of a medium -> function that returns its frames to encode and their place."""


Media = tuple[ConditioningItem, ...]
"""All conditioning media of one video."""


AnyConditioning = ConditioningItem | Media | list[ConditioningItem | Media | None] | None
"""Conditioning media of all videos of a generation; a list has an entry for each."""


def media_of(conditioning: AnyConditioning, count: int) -> list[Media]:
    """Return the conditioning media of each of `count` videos: a list has an entry for each, others apply to all.

    Raises:
        UserError: for a list of another length.
    """
    entries = conditioning if isinstance(conditioning, list) else [conditioning] * count
    if len(entries) != count:
        raise UserError(f"{len(entries)} conditioning inputs for {count} prompts; give one, or one for each prompt")
    return [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries]


def structure_of(media: Media, target: Target) -> tuple[Any, ...]:
    """Key that is equal for videos with conditioning in the same places: these can share a batch."""
    masks = (None if medium.mask is None else (medium.mask.shape, medium.mask.tobytes()) for medium in media)
    return *places_of(media, target), *masks


def places_of(media: Media, target: Target) -> tuple[Any, ...]:
    """Return the kinds and places of media: equal for videos that differ only in pixels and masks."""
    sources = [KINDS[medium.kind](medium, target) for medium in media]
    return tuple(
        (medium.kind, medium.strength, len(source.frames_THWC), *source[1:])
        for medium, source in zip(media, sources, strict=True)
    )


def num_extra_frames(media: Media, target: Target) -> int:
    """Number of extra conditioning frames, in latent frames."""
    return sum(len(KINDS[medium.kind](medium, target).times) for medium in media)


def trained_as(kind: str, frame: int | None) -> str:
    """Return the training conditioning (`train/data/packs/conditioning.py`) that corresponds to a kind."""
    if kind == "keyframe":
        return "keyframes" if frame else "first_frame"
    return kind


def encodable_frames(frames: int, tokenizer: VideoTokenizer) -> int:
    """The largest number of frames, at most `frames`, that can be encoded."""
    if not tokenizer.causal:
        raise UserError("only a causal tokenizer's videos can be continued: its latents do not depend on later frames")
    covering = tokenizer.frames_covering(frames)
    return covering if covering == frames else covering - tokenizer.temporal_compression


def lengthened(video: np.ndarray, length: int, frames: int) -> np.ndarray:
    """The first `length` frames, padded to `frames` by repeating the last.

    Raises:
        UserError: if there are fewer than `length`.
    """
    if len(video) < length:
        raise UserError(
            f"the conditioning video has {len(video)} frames, {length} are needed: set num_frames to at most "
            f"{len(video)}"
        )
    return np.concatenate([video[:length], np.repeat(video[length - 1 : length], frames - length, axis=0)])


def check_conditioning(media: Sequence[ConditioningItem], conditionings: Collection[str], target: Target) -> None:
    """Check media before anything is encoded.

    `conditionings` are those that the network was trained with.

    Raises:
        UserError: for media that do not fit the video or each other, and kinds that the network does not support.
    """
    if len(media) > 1 and strength_of(media) is not None:
        raise UserError("strength is for video-to-video alone: leave out all other conditioning")
    sources = [KINDS[medium.kind](medium, target) for medium in media]
    needs_training = not target.form.is_among or any(source.first is None for source in sources)
    kinds = [trained_as(medium.kind, medium.frame) for medium in media]
    asked = [kind for kind in CHANNEL_FRAMES if kind == "first_frame" or kind in conditionings]
    if not target.form.is_among and not set(asked) <= set(kinds):
        named, flags = " and a ".join(kind.replace("_", " ") for kind in asked), map(CHANNEL_FRAMES.get, asked)
        raise UserError(f"this network needs a {named}: give {' and '.join(flags)}")
    for medium, kind in zip(media, kinds, strict=True):
        if needs_training and kind not in conditionings:
            known = ", ".join(sorted(conditionings)) or "none"
            raise UserError(f"this checkpoint has no {kind} conditioning (supported: {known})")
        if medium.mask is not None and len(medium.mask) not in (1, len(medium.frames)):
            raise UserError(
                f"the mask has {len(medium.mask)} frames, the video {len(medium.frames)}; give 1 mask frame or as many"
            )
        if medium.mask is not None and not medium.mask.any():
            raise UserError("the mask is black everywhere: white marks what is generated, black what stays")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditioningFile:
    """Conditioning file of a request or a command; see `ConditioningItem`."""

    source: Any
    """A path, or the bytes of a file."""
    sha256: str = ""
    """Checksum of a path's file, for records."""
    kind: str = ""
    strength: float | None = None
    keep_frames: int | None = None
    frame: int | None = None
    mask: Any = ""
    """Mask file: a path or bytes, like `source`."""
    mask_sha256: str = ""

    def load(self, read: Callable[[Any], np.ndarray]) -> ConditioningItem:
        """Decode it; `read` turns a path or bytes into frames, uint8 THWC."""
        settings = {name: getattr(self, name) for name in ("kind", "strength", "keep_frames", "frame")}
        mask_THW = white_of(read(self.mask)) if self.mask else None
        return ConditioningItem(frames=read(self.source), mask=mask_THW, **settings)


def named_media(values: Mapping[str, Any], num_frames: int) -> list[ConditioningFile]:
    """Return the conditioning files that the values of `ConditioningOptions` name for a video of `num_frames`.

    Raises:
        UserError: for options that exclude each other, and a malformed keyframe.
    """
    check_conflicts(values)
    named = [(name, kind) for name, kind in KIND_OF_OPTION.items() if values[name] and name != "keyframe"]
    keyframes = map(split_keyframe, values["keyframe"] or ())
    parts = [_medium(name, kind, values, num_frames) for name, kind in named]
    return [*parts, *(ConditioningFile(source=source, kind="keyframe", frame=frame) for frame, source in keyframes)]


def _medium(name: str, kind: str, values: Mapping[str, Any], num_frames: int) -> ConditioningFile:
    settings: dict[str, Any] = {}
    if kind == VIDEO_TO_VIDEO:
        settings["strength"] = DEFAULT_STRENGTH if values["strength"] is None else values["strength"]
    if kind in ("prefix", "suffix"):
        keep_frames = values["keep_frames"]
        settings["keep_frames"] = max(1, num_frames // 2) if keep_frames is None else keep_frames
    if name == "video" and values["mask"]:
        kind, settings = "inpaint", {"mask": values["mask"]}
    return ConditioningFile(source=values[name], kind=kind, **settings)


def white_of(frames_THWC: np.ndarray) -> np.ndarray:
    """Mask, bool THW: True where the frames of a mask are white."""
    return frames_THWC.max(-1) >= DARKEST_WHITE


def decoded(values: Mapping[str, Any], num_frames: int, decode: Callable[[bytes], np.ndarray]) -> Media:
    """Decode the conditioning media of a request for `num_frames`; `decode` turns a file's bytes into uint8 THWC.

    Raises:
        UserError: as `named_media`, and what `decode` raises.
    """
    return tuple(file.load(decode) for file in named_media(values, num_frames))
