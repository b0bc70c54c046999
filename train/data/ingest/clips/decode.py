"""Decoding of sources by `megadit.infer.decoding`: frames, and timelines by which clips are cut.

Frames are uint8, RGB, 0..255. Shapes: T/H/W frames, height, width.
"""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

import numpy as np
from PIL import Image, ImageOps

from megadit.infer.decoding.animations import WebpVideo
from megadit.infer.decoding.frame import Frame
from megadit.infer.decoding.pictures import UNREADABLE, read_picture
from megadit.infer.decoding.rules import Rules, UnusableSourceError
from megadit.infer.decoding.sampling import sampled
from megadit.infer.decoding.video import Video, open_video
from megadit.train.data.ingest.plan import Settings, Source
from megadit.train.data.ingest.pool import have_read, still_alive
from megadit.train.data.ingest.sources.files import file_size, open_file
from megadit.train.data.ingest.sources.sniff import HEAD_BYTES, unknown_picture

THUMBNAIL = 32
"""Side of the grey thumbnails for filters and fingerprints, in pixels."""
SECONDS_REPORTED = 10.0
"""Seconds of video after which progress is reported."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """A whole video as thumbnails and measurements, by which it is cut."""

    height: int
    width: int
    """Size as displayed: rotated, with square pixels."""
    fps: float
    pts: list[int]
    seconds: float
    luma_THW: np.ndarray
    """Brightness, 0..255, THUMBNAIL x THUMBNAIL."""
    motion_T: np.ndarray
    """Change of colours since the previous frame (`motion_between`)."""
    is_damaged_T: np.ndarray
    """Whether a frame was decoded with losses."""
    is_transparent: bool
    conversions: tuple[str, ...]
    """Conversions of format and colour (`infer/decoding`)."""
    is_regular: bool
    """Whether seeking works: the timestamps are those of the file."""


class _Slice(io.RawIOBase):
    """A byte range of a file as a file."""

    def __init__(self, path: str, offset: int, size: int | None) -> None:
        self._file = open_file(path)  # closed with this object
        self._offset = offset
        self._size = file_size(self._file) - offset if size is None else size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer) -> int:
        count = max(0, min(len(buffer), self._size - self._position))
        self._file.seek(self._offset + self._position)
        read = self._file.readinto(memoryview(buffer)[:count])
        self._position += read
        return read

    def close(self) -> None:
        self._file.close()
        super().close()


def open_source(source: Source) -> io.BufferedReader:
    try:
        return io.BufferedReader(_Slice(source.path, source.offset, source.size), buffer_size=1 << 16)
    except OSError as error:
        raise UnusableSourceError("unreadable", error.strerror or str(error)) from None


def rules_of(settings: Settings) -> Rules:
    return Rules(background=settings.background, max_pixels=settings.max_megapixels * 1e6)


# --- images -------------------------------------------------------------------------------------------------------


def read_image(source: Source, settings: Settings) -> Image.Image:
    """Decode an image, upright, in RGB.

    Raises:
        UnusableSourceError: if it cannot be decoded, or is too large.
    """
    with open_source(source) as file:
        # TGA has no magic number
        formats = ("TGA",) if source.name.lower().endswith(".tga") else None
        try:
            return read_picture(file, rules_of(settings), formats)
        except UnusableSourceError as error:
            if error.detail != UNREADABLE:
                raise
        file.seek(0)
        raise UnusableSourceError(*unknown_picture(file.read(HEAD_BYTES)))


def fit_image(image: Image.Image, height: int, width: int) -> np.ndarray:
    """Scaled until it covers height x width, the middle cut out: uint8 HWC."""
    picture = ImageOps.fit(image, (width, height), method=Image.Resampling.LANCZOS)
    return np.array(picture)


def image_thumbnail(image: Image.Image) -> np.ndarray:
    small = image.convert("L").resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    return np.asarray(small)[None]


# --- videos -------------------------------------------------------------------------------------------------------


def read_timeline(source: Source, settings: Settings, most: Callable[[float], int] | None = None) -> Timeline:
    """Thumbnails of all frames of a video (or of the first `most`, given its rate), at `settings.fps` or the video's
    own rate if that is lower.

    Frame k is the one shown at time k / fps, which makes variable frame rates constant. Damaged frames are marked.

    Raises:
        UnusableSourceError: if nothing can be decoded, or the video is too large.
    """
    pts, thumbnails, motion, is_damaged, before, colours = [], [], [], [], None, None
    is_transparent, conversions = False, set()
    with _open_video(source, settings) as video:
        fps = min(settings.fps, video.fps)
        frames = sampled(_within(video.frames(), video.time_base, settings), video.time_base, fps)
        for frame in islice(frames, most and most(fps)):
            change = 0.0
            if before is None or frame.time != before.time:
                is_transparent |= frame.is_transparent
                conversions.update(frame.conversions)
                last, (luma, colours) = colours, frame.thumbnail(THUMBNAIL)
                change = 0.0 if last is None else motion_between(last, colours)
            before = frame
            pts.append(frame.time)
            thumbnails.append(luma)
            motion.append(change)
            is_damaged.append(frame.is_damaged)
        if before is None:
            raise UnusableSourceError("broken", "no frame can be decoded")
        height, width = before.size
    return Timeline(
        height, width, fps, pts, len(pts) / fps, np.stack(thumbnails), np.array(motion, np.float32),
        np.array(is_damaged), is_transparent, tuple(sorted(conversions)), video.is_regular,
    )  # fmt: skip


def _within(frames: Iterator[Frame], time_base: Fraction, settings: Settings) -> Iterator[Frame]:
    first = reported = None
    tick, most, sign = float(time_base), 60 * settings.max_minutes, SECONDS_REPORTED / time_base
    for frame in frames:
        if first is None:
            first = reported = frame.time
        if (frame.time - first) * tick > most:
            raise UnusableSourceError("long", f"it runs for more than {settings.max_minutes:g} minutes")
        if frame.time - reported >= sign:
            have_read((frame.time - reported) * tick)
            reported = frame.time
        yield frame


def read_frames(
    source: Source, settings: Settings, pts: tuple[int, ...], height: int, width: int, *, is_regular: bool = True
) -> np.ndarray:
    """The frames with these timestamps, scaled until they cover height x width, the middle cut out: uint8 THWC.

    Raises:
        UnusableSourceError: if frames are missing.
    """
    pts_left = set(pts)
    for start in (pts[0], pts[0] - 1, None) if is_regular else (None,):
        found: dict[int, np.ndarray] = {}
        with _open_video(source, settings) as video:
            if start is not None and not video.seek(start):
                continue
            for number, frame in enumerate(video.frames()):
                if frame.time in pts_left:
                    if number == 0 and frame.is_deinterlaced and start is not None:
                        break  # the frame before helps to make it whole
                    found[frame.time] = frame.fitted(height, width)
                if len(found) == len(pts_left) or frame.time > pts[-1]:
                    break
        if len(found) == len(pts_left):
            return np.stack([found[time] for time in pts])
    raise UnusableSourceError("changed", f"frames that the scan found are missing; was {source.path} replaced?")


def read_preview(source: Source, settings: Settings, seconds: float, height: int) -> np.ndarray:
    """Decode the frame at `seconds` after the beginning, or the last one, in its own aspect ratio: uint8 HWC.

    Raises:
        UnusableSourceError: if nothing can be decoded.
    """
    if source.kind == "image":
        image = read_image(source, settings)
        return fit_image(image, height, _preview_width(image.height, image.width, height))
    with _open_video(source, settings) as video:
        if seconds:
            video.seek(int(seconds / video.time_base))  # to the key frame before; a reader that cannot is at the start
        seen = None
        for seen in video.frames():
            if float(seen.time * video.time_base) >= seconds:
                break
        if seen is None:
            raise UnusableSourceError("broken", "no frame can be decoded")
        return seen.fitted(height, _preview_width(*seen.size, height))


def _preview_width(shown_height: int, shown_width: int, height: int) -> int:
    """At a height; of strips it is a part."""
    return min(max(1, round(shown_width * height / shown_height)), 4 * height)


@contextmanager
def _open_video(source: Source, settings: Settings) -> Iterator[Video | WebpVideo]:
    with open_source(source) as file, open_video(file, rules_of(settings), beat=still_alive) as video:
        yield video


# --- Amount of motion between two frames ------------------------------------------------------------------------------

MOVING = 0.01
"""Fraction of pixels by which small moving objects are detected."""
LOUDER = 10
"""Factor by which these must change more, because grain and compression change some pixels of still pictures."""


def motion_between(before_HWC: np.ndarray, after_HWC: np.ndarray) -> float:
    """Mean change of colours, 0..255, or if that is larger, a tenth of that of the pixels that change most, so that
    small moving objects count too."""
    change = np.abs(after_HWC.astype(np.int16) - before_HWC).mean(axis=-1).ravel()
    count = max(1, round(MOVING * change.size))
    return float(max(change.mean(), np.partition(change, -count)[-count:].mean() / LOUDER))
