"""Videos and images on disk. Frames are uint8 THWC, RGB, 0..255; an image is a video of one frame."""

import io
import math
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np
from av.video.reformatter import ColorRange, Colorspace

from megadit.infer.decoding.containers import open_container
from megadit.infer.decoding.rules import Rules, UnusableSourceError
from megadit.infer.decoding.sampling import read_all
from megadit.infer.media.animations import ANIMATION_SUFFIXES, IMAGE_SUFFIXES, encode_animation, encode_image
from megadit.infer.media.animations import read_comment as _read_image_comment
from megadit.infer.media.signing import Marker
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path

VIDEO_SUFFIXES = (".mp4", *ANIMATION_SUFFIXES)
_X264_OPTIONS = {"x264-params": "mbtree=0"}
"""Off: macroblock-tree rate control reads out of bounds in small frames, and makes files non-deterministic."""
_HIGH_DEFINITION = 720
"""Height from which on players assume BT.709 if a file does not say."""
_BT709, _SMPTE170M = 1, 6
"""Numbers in ITU-T H.273; the second is BT.601 with 525 lines."""
_LOWEST_FPS = 0.01
_HIGHEST_FPS = {".mp4": 1000, ".gif": 50, ".webp": 1000}


def encode_mp4(frames: np.ndarray, fps: float, *, metadata: dict[str, str] | None = None) -> bytes:
    """Encode `frames` as an H.264 mp4 (libx264, yuv420p, which every browser plays).

    Odd heights and widths are padded by one repeated row or column, because yuv420p halves both. `metadata` goes into
    the container (keys of the format, such as `comment` and `title`).

    Raises:
        UserError: unless `frames` are uint8 THWC with three channels, and fps is in the range of an mp4.
    """
    buffer = io.BytesIO()
    _write_mp4(buffer, [frames], fps, metadata)
    return buffer.getvalue()


def stream_mp4(
    path: str | Path,
    parts: Iterable[np.ndarray],
    fps: float,
    *,
    metadata: dict[str, str] | None = None,
    mark: Marker | None = None,
) -> None:
    """Writes an mp4 atomically from an iterator of frames (uint8 THWC); see `encode_mp4`.

    Only one array is in memory at a time. `mark` signs it.
    """
    with atomic_path(path) as temporary:
        with temporary.open("wb") as file:
            _write_mp4(file, parts, fps, metadata)
        if mark is not None:
            mark.mark_file(temporary, ".mp4")


def _write_mp4(file: BinaryIO, parts: Iterable[np.ndarray], fps: float, metadata: dict[str, str] | None) -> None:
    check_fps(".mp4", fps)
    stream = None
    with av.open(file, "w", format="mp4") as container:
        container.metadata.update(metadata or {})
        for frames in parts:
            _check_frames(frames)
            height, width = frames.shape[1:3]
            frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
            if stream is None:
                rate = Fraction(fps).limit_denominator(1001)
                stream = container.add_stream("libx264", rate=rate, options=_X264_OPTIONS)
                stream.height, stream.width = frames.shape[1:3]
                stream.pix_fmt = "yuv420p"
                colors = _tag_colors(stream.codec_context, stream.height)
            for frame in frames:
                pixels = av.VideoFrame.from_ndarray(frame, format="rgb24")
                container.mux(stream.encode(pixels.reformat(format="yuv420p", dst_colorspace=colors, threads=1)))
        container.mux(stream.encode())


def _tag_colors(context: av.VideoCodecContext, height: int) -> Colorspace:
    """Tags a stream with its colour space, which players otherwise guess by the height: BT.709 from 720 lines, BT.601
    below."""
    is_high = height >= _HIGH_DEFINITION
    context.colorspace = _BT709 if is_high else _SMPTE170M
    context.color_primaries = context.color_trc = _BT709
    context.color_range = ColorRange.MPEG.value
    return Colorspace.ITU709 if is_high else Colorspace.ITU601


def check_fps(suffix: str, fps: float) -> None:
    """Raises UserError if a file of this type cannot store this frame rate."""
    highest = _HIGHEST_FPS.get(suffix, math.inf)
    if not _LOWEST_FPS <= fps <= highest:
        raise UserError(f"fps={fps} must lie between {_LOWEST_FPS} and {highest} in a {suffix[1:]}")


def write_video(
    path: str | Path,
    frames: np.ndarray,
    fps: float = 0,
    *,
    metadata: dict[str, str] | None = None,
    mark: Marker | None = None,
) -> None:
    """Writes frames to `path` atomically: an mp4, gif or webp, or an image (png, jpg) of one frame.

    The suffix of `path` decides; `fps` is ignored for an image. Formats other than mp4 support only `comment` in
    `metadata`, which must be ASCII. `mark` signs the file.

    Raises:
        UserError: for another suffix, several frames for an image, and as `encode_mp4`.
    """
    path = Path(path)
    suffix, comment = path.suffix.lower(), (metadata or {}).get("comment", "")
    if suffix in IMAGE_SUFFIXES:
        data = _encode_image(frames, suffix, comment)
    elif suffix in ANIMATION_SUFFIXES:
        data = _encode_animation(frames, fps, suffix, comment)
    elif suffix in VIDEO_SUFFIXES:
        data = encode_mp4(frames, fps, metadata=metadata)
    else:
        raise UserError(f"cannot write {path}: use a name that ends in {', '.join(VIDEO_SUFFIXES + IMAGE_SUFFIXES)}")
    with atomic_path(path) as temporary:
        temporary.write_bytes(data if mark is None else mark(data, suffix))


def read_video(path: str | Path) -> tuple[np.ndarray, float]:
    """Read the frames (uint8 THWC) of a video or an image, and frames per second (0 for an image).

    Raises:
        UserError: if the file is missing, a device or a pipe, or cannot be decoded.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # some devices and pipes never end
        raise UserError(f"cannot read {path}: it is no file")
    try:
        with path.open("rb") as file:
            return read_all(file, Rules())
    except (OSError, UnusableSourceError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def read_comment(path: str | Path) -> str:
    """The comment inside a video or image that `write_video` wrote; empty if there is none.

    Raises:
        UserError: if the file is missing or cannot be decoded.
    """
    path = Path(path)
    try:
        if path.suffix.lower() in IMAGE_SUFFIXES + ANIMATION_SUFFIXES:
            return _read_image_comment(path)
        with open_container(str(path)) as container:
            return container.metadata.get("comment", "")
    except (OSError, SyntaxError, av.FFmpegError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _encode_image(frames: np.ndarray, suffix: str, comment: str) -> bytes:
    _check_frames(frames)
    if len(frames) != 1:
        raise UserError(f"an image holds one frame, got {len(frames)}; use a name that ends in .mp4")
    return encode_image(frames[0], suffix, comment)


def _encode_animation(frames: np.ndarray, fps: float, suffix: str, comment: str) -> bytes:
    _check_frames(frames)
    if len(frames) > 1:
        check_fps(suffix, fps)
    return encode_animation(frames, fps, suffix, comment)


def _check_frames(frames: np.ndarray) -> None:
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise UserError(f"frames must be uint8 [T, H, W, 3], got {frames.dtype} {list(frames.shape)}")
