"""Videos and images on disk. Frames are uint8 THWC, RGB, 0..255; an image is a video of one frame."""

import gc
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import imageio.v3 as iio
import numpy as np

from megadit.models.support import UserError, atomic_path

VIDEO_SUFFIXES = (".mp4",)
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")


@contextmanager
def _cheap_collection() -> Iterator[None]:
    """Keeps what exists out of garbage collection: imageio collects whenever it closes or forgets a video, and with
    torch loaded that takes ten times as long as a small video itself. Decorates functions, so that their open file is
    forgotten inside."""
    if gc.get_freeze_count():  # somebody else's; unfreezing would undo it
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@_cheap_collection()
def encode_mp4(frames: np.ndarray, fps: float, *, metadata: dict[str, str] | None = None) -> bytes:
    """An H.264 mp4 (libx264, yuv420p, which every browser plays) of `frames`.

    Odd heights and widths are padded by one repeated row or column, because yuv420p halves both. `metadata` goes into
    the container (`comment`, `title`, ... are what the format knows).

    Raises:
        UserError: unless `frames` are uint8 THWC with three channels, and fps is positive.
    """
    _check_frames(frames)
    if not 0 < fps < math.inf:
        raise UserError(f"fps={fps} must be greater than 0")
    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    buffer = io.BytesIO()
    with iio.imopen(buffer, "w", plugin="pyav", extension=".mp4") as file:
        file.init_video_stream("libx264", fps=float(fps), pixel_format="yuv420p")
        file.container_metadata.update(metadata or {})
        for frame in frames:
            file.write_frame(frame)
    return buffer.getvalue()


def write_video(
    path: str | Path, frames: np.ndarray, fps: float = 0, *, metadata: dict[str, str] | None = None
) -> None:
    """Writes frames to `path`, whole or not at all: an mp4, or an image (png, jpg) where there is one frame.

    The suffix of `path` decides; `fps` and `metadata` are of no use to an image.

    Raises:
        UserError: for another suffix, several frames into an image, and what `encode_mp4` refuses.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix in VIDEO_SUFFIXES:
        data = encode_mp4(frames, fps, metadata=metadata)
    elif suffix in IMAGE_SUFFIXES:
        data = _encode_image(frames, suffix)
    else:
        raise UserError(f"cannot write {path}: use a name that ends in {', '.join(VIDEO_SUFFIXES + IMAGE_SUFFIXES)}")
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def read_video(path: str | Path) -> tuple[np.ndarray, float]:
    """Frames (uint8 THWC) of a video or an image, and frames per second (0 for an image).

    Raises:
        UserError: if the file is missing or cannot be decoded.
    """
    path = Path(path)
    try:
        if path.suffix.lower() in IMAGE_SUFFIXES:
            return iio.imread(path, plugin="pillow", mode="RGB")[None], 0.0
        return _read_mp4(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from error


@_cheap_collection()
def _read_mp4(path: Path) -> tuple[np.ndarray, float]:
    with iio.imopen(path, "r", plugin="pyav") as file:
        return file.read(), float(file.metadata()["fps"])


def _encode_image(frames: np.ndarray, suffix: str) -> bytes:
    _check_frames(frames)
    if len(frames) != 1:
        raise UserError(f"an image holds one frame, got {len(frames)}; use a name that ends in .mp4")
    options = {"quality": 95} if suffix != ".png" else {}
    return iio.imwrite("<bytes>", frames[0], extension=suffix, **options)


def _check_frames(frames: np.ndarray) -> None:
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise UserError(f"frames must be uint8 [T, H, W, 3], got {frames.dtype} {list(frames.shape)}")
