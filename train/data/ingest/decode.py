"""Frames of videos and images of any origin. Nothing here trusts a file: sizes are checked before pixels are made,
containers that lead to other files are not opened, and whatever a decoder raises becomes an `UnusableSourceError`.

Frames are uint8, RGB, 0..255. Shapes: T/H/W frames, height, width.
"""

import io
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

import av
import numpy as np
from PIL import Image, ImageOps

from megadit.infer.animations import is_webp, webp_size
from megadit.infer.video_io import open_container
from megadit.train.data.ingest.animations import WebpVideo
from megadit.train.data.ingest.files import file_size, open_file
from megadit.train.data.ingest.motion import motion_between
from megadit.train.data.ingest.plan import Settings, Source
from megadit.train.data.ingest.pool import still_alive

THUMBNAIL = 32
"""Side of the grey pictures that clips are judged by."""
MAX_GAP_SECONDS = 10.0
"""Between two frames; a longer one is a broken timestamp."""
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")


class UnusableSourceError(ValueError):
    """A source that gives no frames. `reason` is one of a few words to count by, `detail` says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Timeline:
    """A whole video, small: enough to decide what to cut from it."""

    height: int
    width: int
    """As shown: rotated, with square pixels."""
    fps: float
    pts: list[int]
    seconds: float
    luma_THW: np.ndarray
    """Brightness, 0..255, THUMBNAIL x THUMBNAIL."""
    motion_T: np.ndarray
    """Change of its colours since the frame before (`motion_between`); things as bright as what they cover count."""
    is_transparent: bool


class _Slice(io.RawIOBase):
    """A stretch of a file as a file."""

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


# --- images -------------------------------------------------------------------------------------------------------


def read_image(source: Source, settings: Settings) -> Image.Image:
    """The picture, upright, in RGB.

    Raises:
        UnusableSourceError: if it cannot be decoded, or is too large to try.
    """
    with open_source(source) as file:
        try:
            _check_canvas(file.peek(30)[:30], settings)
            image = Image.open(file, formats=IMAGE_FORMATS)
            _check_pixels(image.width, image.height, settings)
            return opaque(ImageOps.exif_transpose(image), settings)
        except UnusableSourceError:
            raise
        except Exception as error:  # decoders raise whatever they like
            raise UnusableSourceError("broken", f"{type(error).__name__}: {error}") from None


def _check_canvas(head: bytes, settings: Settings) -> None:
    """The size that the header of a WebP announces: its decoder makes room for it before anybody can ask how large."""
    size = webp_size(head)
    if size is not None:
        _check_pixels(*size, settings)


TRANSPARENT = "transparent"
"""In `info` of an image that the background was seen through."""


def opaque(image: Image.Image, settings: Settings) -> Image.Image:
    """The picture in RGB, where it is transparent in front of `settings.background`."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    if image.getextrema()[3][0] == 255:
        return image.convert("RGB")
    ground = Image.new("RGBA", image.size, settings.background)
    shown = Image.alpha_composite(ground, image).convert("RGB")
    shown.info[TRANSPARENT] = True
    return shown


def opaque_frame(frame: av.VideoFrame, settings: Settings) -> tuple[av.VideoFrame, bool]:
    """The same of a frame of video, which no longer says how it is turned, and whether the background is seen."""
    if not (frame.format.has_palette or any(part.is_alpha for part in frame.format.components)):
        return frame, False
    shown = opaque(Image.fromarray(frame.to_ndarray(format="rgba"), "RGBA"), settings)
    if TRANSPARENT not in shown.info:
        return frame, False
    made = av.VideoFrame.from_image(shown)
    made.pts, made.time_base = frame.pts, frame.time_base
    return made, True


def fit_image(image: Image.Image, height: int, width: int) -> np.ndarray:
    """Scaled until it covers height x width, the middle cut out: uint8 HWC."""
    picture = ImageOps.fit(image, (width, height), method=Image.Resampling.LANCZOS)
    return np.array(picture)


def image_thumbnail(image: Image.Image) -> np.ndarray:
    small = image.convert("L").resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    return np.asarray(small)[None]


# --- videos -------------------------------------------------------------------------------------------------------


def read_timeline(source: Source, settings: Settings, most: Callable[[float], int] | None = None) -> Timeline:
    """Every frame of the video once (or the first `most` of its rate), small, at `settings.fps` or the video's own rate
    where that is slower.

    Frame k is the one shown at time k / fps, so that videos of variable rate come out even. What follows a damaged
    stretch is used as far as it can be decoded.

    Raises:
        UnusableSourceError: if nothing can be decoded, or the video is too large to try.
    """
    with _open_video(source, settings) as video:
        fps = min(settings.fps, video.fps)
        pts, thumbnails, motion, colours, is_transparent = [], [], [], None, False
        for frame in islice(_sampled(video.frames(), video.time_base, fps, settings), most and most(fps)):
            change = 0.0
            if not pts or frame.pts != pts[-1]:
                height, width = _shown_size(frame, video.pixel_aspect)
                frame, is_seen_through = opaque_frame(frame, settings)
                is_transparent |= is_seen_through
                luma, colours, before = _thumbnail(frame, "gray"), _thumbnail(frame, "rgb24"), colours
                change = 0.0 if before is None else motion_between(before, colours)
            pts.append(frame.pts)
            thumbnails.append(luma)
            motion.append(change)
    if not pts:
        raise UnusableSourceError("broken", "no frame can be decoded")
    return Timeline(
        height, width, fps, pts, len(pts) / fps, np.stack(thumbnails), np.array(motion, np.float32), is_transparent
    )


def _thumbnail(frame: av.VideoFrame, format: str) -> np.ndarray:
    return frame.reformat(THUMBNAIL, THUMBNAIL, format=format, interpolation="AREA").to_ndarray()


def read_frames(source: Source, settings: Settings, pts: tuple[int, ...], height: int, width: int) -> np.ndarray:
    """The frames with these timestamps, scaled until they cover height x width, the middle cut out: uint8 THWC.

    Raises:
        UnusableSourceError: if they are not all there.
    """
    for seek in (True, False):
        wanted = set(pts)
        found: dict[int, np.ndarray] = {}
        with _open_video(source, settings) as video:
            if seek and not video.seek(pts[0]):
                continue
            for frame in video.frames():
                if frame.pts in wanted:
                    shown, _ = opaque_frame(frame, settings)
                    found[frame.pts] = _fitted(shown, _quarter_turns(frame), video.pixel_aspect, height, width)
                if len(found) == len(wanted) or frame.pts > pts[-1]:
                    break
        if len(found) == len(wanted):
            return np.stack([found[time] for time in pts])
    raise UnusableSourceError("changed", f"frames that were there are gone; was {source.path} replaced?")


def read_glimpse(source: Source, settings: Settings, seconds: float, height: int) -> np.ndarray:
    """What is shown so many seconds after the beginning, or last of all, in its own shape: uint8 HWC.

    Raises:
        UnusableSourceError: if nothing can be decoded.
    """
    if source.kind == "image":
        image = read_image(source, settings)
        return fit_image(image, height, _glimpse_width(image.height, image.width, height))
    with _open_video(source, settings) as video:
        if seconds:
            video.seek(int(seconds / video.time_base))  # to the key frame before; a reader that cannot is at the start
        seen = None
        for seen in video.frames():
            if float(seen.pts * video.time_base) >= seconds:
                break
        if seen is None:
            raise UnusableSourceError("broken", "no frame can be decoded")
        width = _glimpse_width(*_shown_size(seen, video.pixel_aspect), height)
        shown, _ = opaque_frame(seen, settings)
        return _fitted(shown, _quarter_turns(seen), video.pixel_aspect, height, width)


def _glimpse_width(shown_height: int, shown_width: int, height: int) -> int:
    """At a height; of strips it is a part."""
    return min(max(1, round(shown_width * height / shown_height)), 4 * height)


class _Video:
    """The first video of a container that ffmpeg reads."""

    def __init__(self, container: av.container.InputContainer, settings: Settings) -> None:
        if not container.streams.video:
            raise UnusableSourceError("broken", "it holds no video")
        self._container, self._stream = container, container.streams.video[0]
        self._stream.codec_context.thread_count = 1  # sources are read side by side already
        _check_pixels(self._stream.width, self._stream.height, settings)

    @property
    def time_base(self) -> Fraction:
        return self._stream.time_base

    @property
    def fps(self) -> float:
        for rate in (self._stream.average_rate, self._stream.guessed_rate, self._stream.base_rate):
            if rate is not None and 0.1 < float(rate) < 1000:
                return float(rate)
        return math.inf

    @property
    def pixel_aspect(self) -> float:
        """Width of a pixel by its height; frames do not say."""
        ratio = self._stream.sample_aspect_ratio
        return float(ratio) if ratio and 0.1 < ratio < 10 else 1.0

    def seek(self, pts: int) -> bool:
        """Goes to the last key frame before `pts`; False if the container cannot."""
        try:
            self._container.seek(pts, stream=self._stream, backward=True)
        except (av.FFmpegError, OSError):
            return False
        return True

    def frames(self) -> Iterator[av.VideoFrame]:
        """Frames with growing timestamps; packets that cannot be decoded are left out."""
        last = None
        packets = self._container.demux(self._stream)
        while True:
            still_alive()
            try:
                frames = next(packets).decode()
            except StopIteration:
                return
            except av.InvalidDataError:
                continue
            except (av.FFmpegError, EOFError):
                return
            for frame in frames:
                if frame.pts is not None and (last is None or frame.pts > last):
                    last = frame.pts
                    yield frame


@contextmanager
def _open_video(source: Source, settings: Settings) -> Iterator[_Video | WebpVideo]:
    with open_source(source) as file:
        try:
            head = file.peek(30)[:30]
            if is_webp(head):
                _check_canvas(head, settings)
                yield WebpVideo(file)
                return
            with open_container(file, max_pixels=settings.max_megapixels * 1e6) as container:
                yield _Video(container, settings)
        except (av.FFmpegError, OSError, ValueError, EOFError) as error:
            if isinstance(error, UnusableSourceError):
                raise
            message = error.strerror if isinstance(error, av.FFmpegError) else error
            raise UnusableSourceError("broken", str(message)) from None


def _sampled(
    frames: Iterator[av.VideoFrame], time_base: Fraction, fps: float, settings: Settings
) -> Iterator[av.VideoFrame]:
    """The frame shown at each of the times first + k / fps, which some containers round to their ticks."""
    first = shown = None
    tick = min(float(time_base), 0.25 / fps) + 1e-6
    count = 0
    for frame in frames:
        time = float(frame.pts * time_base)
        if shown is None:
            first, shown, shown_time = time, frame, time
            continue
        if time - shown_time > MAX_GAP_SECONDS:
            raise UnusableSourceError("broken", f"{time - shown_time:.0f} seconds lie between two of its frames")
        if time - first > 60 * settings.max_minutes:
            raise UnusableSourceError("long", f"it runs for more than {settings.max_minutes:g} minutes")
        while first + count / fps < time - tick:
            yield shown
            count += 1
        shown, shown_time = frame, time
    if shown is not None and first + count / fps <= shown_time + tick:
        yield shown


def _quarter_turns(frame: av.VideoFrame) -> int:
    """Counter-clockwise, 0 to 3."""
    return round(frame.rotation / 90) % 4


def _shown_size(frame: av.VideoFrame, pixel_aspect: float) -> tuple[int, int]:
    """Height and width as a player shows them."""
    width = round(frame.width * pixel_aspect)
    return (width, frame.height) if _quarter_turns(frame) % 2 else (frame.height, width)


def _fitted(frame: av.VideoFrame, quarter_turns: int, pixel_aspect: float, height: int, width: int) -> np.ndarray:
    if quarter_turns % 2:
        height, width = width, height
    shown_width = frame.width * pixel_aspect
    scale = max(height / frame.height, width / shown_width)
    scaled_height, scaled_width = max(height, round(frame.height * scale)), max(width, round(shown_width * scale))
    picture = frame.reformat(scaled_width, scaled_height, format="rgb24", interpolation="AREA").to_ndarray()
    top, left = (scaled_height - height) // 2, (scaled_width - width) // 2
    picture = picture[top : top + height, left : left + width]
    return np.ascontiguousarray(np.rot90(picture, quarter_turns))


def _check_pixels(width: int, height: int, settings: Settings) -> None:
    if not width * height:
        raise UnusableSourceError("broken", "its pictures have no size")
    if width * height > settings.max_megapixels * 1e6:
        raise UnusableSourceError(
            "too large", f"{width}x{height} pixels; at most {settings.max_megapixels:g} megapixels"
        )
