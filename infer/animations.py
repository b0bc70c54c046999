"""Images, gif and webp by Pillow, with a comment inside. Frames are uint8 THWC, RGB."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from megadit.models.shared.errors import UserError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
ANIMATION_SUFFIXES = (".gif", ".webp")
_IMAGE_DESCRIPTION = 0x010E
"""The Exif tag that holds a comment in webp."""


def encode_image(frame_HWC: np.ndarray, suffix: str, comment: str = "") -> bytes:
    """A png, or a jpg of high quality; `comment` is ASCII."""
    if suffix == ".png":
        info = PngInfo()
        info.add_text("comment", comment)
        return _saved([frame_HWC], format="PNG", pnginfo=info)
    return _saved([frame_HWC], format="JPEG", quality=95, comment=comment.encode("ascii"))


def encode_animation(frames: np.ndarray, fps: float, suffix: str, comment: str = "") -> bytes:
    """An endless gif (256 colours, durations in hundredths of a second) or webp; `comment` is ASCII."""
    if suffix == ".gif":
        options = {"format": "GIF", "duration": 10 * round(100 / fps) if fps else 0, "comment": comment.encode("ascii")}
        return _saved(frames, save_all=True, loop=0, **options)
    exif = Image.Exif()
    exif[_IMAGE_DESCRIPTION] = comment
    duration = round(1000 / fps) if fps else 0
    return _saved(frames, save_all=True, loop=0, format="WEBP", duration=duration, quality=90, exif=exif)


def read_frames(path: Path) -> tuple[np.ndarray, float]:
    """Frames of an image or animation, and frames per second (0 for one frame).

    A frame that is shown longer than the shortest counts several times: writers join frames that are alike.

    Raises:
        UserError: if it cannot be decoded.
    """
    with _opened(path) as image:
        return animation_frames(image)


def animation_frames(
    image: Image.Image, check: Callable[[int], None] = lambda num_frames: None
) -> tuple[np.ndarray, float]:
    """As `read_frames`, of an open image; `check` may refuse so many frames before they are made."""
    check(1)
    check(getattr(image, "n_frames", 1))
    frames, durations = [], []
    for index in range(getattr(image, "n_frames", 1)):
        image.seek(index)
        frames.append(np.asarray(image.convert("RGB")))
        durations.append(image.info.get("duration", 0))
    shortest = min(durations)
    if len(frames) == 1 or not shortest:
        return np.stack(frames), 0.0
    times = np.rint(np.array(durations) / shortest).astype(int)
    check(int(times.sum()))
    return np.stack(frames).repeat(times, axis=0), 1000 / shortest


def is_webp(head: bytes) -> bool:
    return head[:4] == b"RIFF" and head[8:12] == b"WEBP"


def webp_size(head: bytes) -> tuple[int, int] | None:
    """(width, height) that the first 30 bytes of a WebP announce; None of another file."""
    if not is_webp(head):
        return None
    match head[12:16]:
        case b"VP8X":
            return tuple(1 + int.from_bytes(head[start : start + 3], "little") for start in (24, 27))
        case b"VP8L":
            bits = int.from_bytes(head[21:25], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case _:
            return tuple(int.from_bytes(head[start : start + 2], "little") & 0x3FFF for start in (26, 28))


def read_comment(path: Path) -> str:
    """The comment inside an image or animation; empty where there is none.

    Raises:
        UserError: if it cannot be read.
    """
    with _opened(path) as image:
        comment = image.info.get("comment") or image.getexif().get(_IMAGE_DESCRIPTION, "")
    return comment.decode("ascii", "replace") if isinstance(comment, bytes) else comment


def _opened(path: Path) -> Image.Image:
    try:
        return Image.open(path)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _saved(frames: np.ndarray | list[np.ndarray], **options) -> bytes:
    first, *rest = [Image.fromarray(frame) for frame in frames]
    buffer = io.BytesIO()
    if rest:
        options["append_images"] = rest
    first.save(buffer, **options)
    return buffer.getvalue()
