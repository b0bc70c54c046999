"""Frames at a constant rate, and all frames of a file at once."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import BinaryIO

import numpy as np

from megadit.infer.decoding.animations import HEAD_BYTES, is_animated
from megadit.infer.decoding.containers import CONTAINERS
from megadit.infer.decoding.frame import Frame
from megadit.infer.decoding.pictures import read_picture
from megadit.infer.decoding.rules import Rules, UnusableSourceError
from megadit.infer.decoding.video import open_video
from megadit.models.shared.resources import host_memory

_PICTURES = (b"\xff\xd8\xff", b"\x89PNG", b"BM", b"II*\0", b"MM\0*", b"P1", b"P2", b"P3", b"P4", b"P5", b"P6", b"Pf",
             b"qoif", b"\xff\x0a", b"\xff\x4f\xff\x51", b"\0\0\0\x0cJXL ", b"\0\0\0\x0cjP  ")  # fmt: skip
_STREAMS_OF_PICTURES = (".mjpeg", ".mjpg")
_BRANDS = (b"avif", b"heic", b"heix", b"mif1")
_COPIES = 2
"""Frames are in memory twice, when they become one array."""
ROUNDED_TO = 0.001
"""Seconds; times may have been rounded this much before they were written to the container."""
MOST_SECONDS = 24 * 3600.0
"""Longest video that is read at once: a damaged time may lie years ahead, and all frames until then would be filled
in."""
USUAL_FPS = 25.0
"""Frame rate of a video that states none, as FFmpeg assumes."""
_HELD = 1.5
"""The last frame is repeated if it lasts longer than this many frame intervals."""
Check = Callable[[int, int, int, float], None]
"""(number of frames, height, width, seconds) -> None; may raise to refuse them before they are decoded."""


def is_picture(head: bytes) -> bool:
    """Whether a file that begins with `head` (`HEAD_BYTES`) is a still picture."""
    if head[4:8] == b"ftyp":
        return head[8:12] in _BRANDS
    return head.startswith((*_PICTURES, b"RIFF")) and not is_animated(head) and head[8:12] != b"AVI "


def sampled(frames: Iterator[Frame], time_base: Fraction, fps: float) -> Iterator[Frame]:
    """The frame shown at each of the times first + k / fps; some containers round times to their ticks."""
    first = shown = None
    shown_time = 0.0
    tick = min(max(float(time_base), ROUNDED_TO), 0.25 / fps) + 1e-6
    count = 0
    for frame in frames:
        time = float(frame.time * time_base)
        if shown is None:
            first = time
        else:
            is_lost = frame.is_damaged or frame.follows_loss
            while first + count / fps < time - tick:
                is_held = first + count / fps > shown_time + _HELD / fps
                yield replace(shown, is_damaged=True) if is_lost and is_held else shown
                count += 1
        shown, shown_time = frame, time
    if shown is None:
        return
    lasts = float(shown.duration * time_base)
    if first + count / fps <= shown_time + max(tick, 0.25 * min(lasts, 1 / fps)):
        yield shown
        count += 1
    while lasts > _HELD / fps and first + count / fps < shown_time + lasts - tick:
        yield shown
        count += 1


def read_all(
    file: BinaryIO,
    rules: Rules,
    check: Check = lambda num_frames, height, width, seconds: None,
    *,
    containers: str = CONTAINERS,
    formats: tuple[str, ...] | None = None,
) -> tuple[np.ndarray, float]:
    """Frames (uint8 THWC) of a file (positioned at its start), and frames per second (0 for a still picture).

    A variable frame rate is resampled to a constant one; all frames are resized to the size of the first.

    Raises:
        UnusableSourceError: if it cannot be decoded, frames are damaged, or it is too large for the memory.
    """
    head = file.read(HEAD_BYTES)
    file.seek(0)
    is_stream = str(getattr(file, "name", "")).lower().endswith(_STREAMS_OF_PICTURES)  # begins as a JPEG does
    if is_picture(head) and not is_stream:
        image = read_picture(file, rules, formats, lambda width, height: check(1, height, width, 0.0))
        return np.asarray(image)[None], 0.0
    with open_video(file, rules, containers=containers) as video:
        fps = video.fps if video.fps < math.inf else USUAL_FPS
        pictures, size, before, most = [], None, None, math.inf
        check(1, 1, 1, video.seconds)
        frames = _within_seconds(video.frames(), video.time_base, lambda seconds: check(1, 1, 1, seconds))
        for frame in _whole(sampled(frames, video.time_base, fps)):
            if size is None:
                size = frame.size
                most = host_memory() // (_COPIES * 3 * size[0] * size[1])
            check(len(pictures) + 1, *size, len(pictures) / fps)
            if len(pictures) >= most:
                raise UnusableSourceError(
                    "too large",
                    f"its {most:,} first frames of {size[1]}x{size[0]} fill the memory; cut it, or scale it",
                )
            pictures.append(pictures[-1] if frame is before else frame.fitted(*size))
            before = frame
    if not pictures:
        raise UnusableSourceError("broken", "no frame can be decoded")
    return np.stack(pictures), fps if len(pictures) > 1 else 0.0


def _within_seconds(frames: Iterator[Frame], time_base: Fraction, check: Callable[[float], None]) -> Iterator[Frame]:
    """The frames, whose seconds since the first are checked before the times between them are filled in.

    Raises:
        UnusableSourceError: if they are more than `MOST_SECONDS`.
    """
    first = None
    for frame in frames:
        first = frame.time if first is None else first
        seconds = max(float((end - first) * time_base) for end in (frame.time, frame.time + frame.duration))
        if not seconds <= MOST_SECONDS:
            raise UnusableSourceError("damaged", f"its times reach {seconds:,.0f} s; at most {MOST_SECONDS:,.0f} s")
        check(seconds)
        yield frame


def _whole(frames: Iterator[Frame]) -> Iterator[Frame]:
    """The frames between a damaged beginning and a damaged end.

    Raises:
        UnusableSourceError: if damaged frames are in the middle, or all frames are damaged.
    """
    num_damaged = num_whole = 0
    for frame in frames:
        if frame.is_damaged:
            num_damaged += 1
        elif num_damaged and num_whole:
            raise UnusableSourceError("damaged", f"{num_damaged} of its frames, after the first {num_whole}")
        else:
            num_damaged, num_whole = 0, num_whole + 1
            yield frame
    if num_damaged and not num_whole:
        raise UnusableSourceError("damaged", "all of its frames")
