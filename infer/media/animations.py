"""Images, gif and webp written by Pillow, with a comment inside. Frames are uint8 THWC, RGB."""

import io
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from megadit.models.shared.errors import UserError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
ANIMATION_SUFFIXES = (".gif", ".webp")
_IMAGE_DESCRIPTION = 0x010E
"""Exif tag of the comment in a webp."""


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


def read_comment(path: Path) -> str:
    """The comment inside an image or animation; empty if there is none.

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
