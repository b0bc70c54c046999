"""Window of a video that an evaluation uses: a number of frames from its middle, at one size.

Shapes: N videos, T/H/W frames, height, width, C colour channels. Pixels are uint8, RGB, 0..255.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megadit.infer.evaluate.extractors.base import resized
from megadit.infer.evaluate.videos import Clip, VideoChunk
from megadit.models.shared.errors import UserError

MOST_FRAMES = 16
"""Most frames of a window by default, as in FVD."""
RATE_TOLERANCE = 0.01
"""Largest relative difference of equal frame rates: 23.976 and 24 are one rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    frames: int
    height: int
    width: int
    fps: float
    """Frames per second; 0 if unknown, or for single frames."""
    is_resized: bool
    """Whether videos of other sizes are cropped and resized; they are refused otherwise."""

    @property
    def text(self) -> str:
        """Description of the window in a protocol."""
        rate = f" at {self.fps:g} fps" if self.fps else ""
        how = ", cropped and resized" if self.is_resized else ""
        return f"{self.frames} frames of {self.height}x{self.width}{rate} from the middle{how}"


def window_of(
    clip: Clip, frames: int | None, size: Sequence[int] | None, fps: float = 0.0, most: int = MOST_FRAMES
) -> Window:
    """The window for a first video: `frames` (default: its length, at most `most`) and `size` (height, width; default:
    its own). Faster videos are subsampled to `fps` (0: none)."""
    clip = thinned(clip, fps)
    length, height, width, _ = clip.video_THWC.shape
    seen = frames or min(length, most)
    return Window(
        frames=seen,
        height=size[0] if size else height,
        width=size[1] if size else width,
        fps=round(clip.fps, 3) if seen > 1 else 0.0,
        is_resized=size is not None,
    )


def thinned(clip: Clip, fps: float) -> Clip:
    """The clip subsampled to `fps`, by the nearest frames; unchanged if that is its own rate."""
    if not (clip.fps and fps) or clip.fps / fps - 1 <= RATE_TOLERANCE:
        return clip
    step, length = clip.fps / fps, len(clip.video_THWC)
    chosen = np.minimum(np.round(np.arange(int((length - 1) / step) + 1) * step).astype(int), length - 1)
    return replace(clip, video_THWC=clip.video_THWC[chosen], fps=fps)


def windowed(part: VideoChunk, window: Window) -> tuple[Tensor, list[str]]:
    """The windows of the videos of a chunk, [N, T, H, W, C], and their prompts. Raises UserError for a video that is
    shorter, or has another size or a lower frame rate."""
    clips = part.read()
    videos = [cut(clip, name, window) for clip, name in zip(clips, part.names, strict=True)]
    return torch.stack(videos), [clip.prompt for clip in clips]


def cut(clip: Clip, name: str, window: Window) -> Tensor:
    """Cut the window out of a video, [T, H, W, C]. Raises UserError as `windowed`; `name` is the video's, for the
    message."""
    clip = thinned(clip, window.fps)
    length, height, width, _ = clip.video_THWC.shape
    if length < window.frames:
        raise UserError(
            f"{name} has {length} frames, fewer than {window.frames}: drop it, or give `megadit evaluate` "
            f"--frames {length}"
        )
    if clip.fps and window.fps and abs(clip.fps / window.fps - 1) > RATE_TOLERANCE:
        raise UserError(
            f"{name} has {clip.fps:g} frames per second, others {window.fps:g}: motion cannot be compared; re-encode "
            "one side"
        )
    first = (length - window.frames) // 2
    video_THWC = torch.from_numpy(clip.video_THWC[first : first + window.frames])
    if (height, width) == (window.height, window.width):
        return video_THWC
    if not window.is_resized:
        raise UserError(
            f"{name} is {height}x{width}, others are {window.height}x{window.width}: give --size {window.height} "
            f"{window.width} to crop and resize all of them"
        )
    scale = min(height / window.height, width / window.width)
    rows, columns = round(window.height * scale), round(window.width * scale)
    top, left = (height - rows) // 2, (width - columns) // 2
    cropped = video_THWC[:, top : top + rows, left : left + columns]
    return resized(cropped[None], window.height, window.width)[0].round().byte().permute(1, 2, 3, 0)
