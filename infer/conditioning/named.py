"""Conditioning options as media: each file with its kind; files are paths or, in a request, bytes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megadit.infer.conditioning.items import VIDEO_TO_VIDEO, ConditioningItem, Media
from megadit.models.diffusion.conditioning_settings import KINDS, check_conflicts, split_keyframe

DEFAULT_STRENGTH = 0.6
DARKEST_WHITE = 128
"""Lowest value of a mask's white pixel, 0..255."""


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
    named = [(name, kind) for name, kind in KINDS.items() if values[name] and name != "keyframe"]
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
