"""Pictures as shown: upright, in 8-bit sRGB, on a background where transparent."""

import io
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, PngImagePlugin

from megadit.infer.decoding.animations import check_bytes, webp_size
from megadit.infer.decoding.colour import coded_to_srgb, conversion, gamma_to_srgb, profile_to_srgb
from megadit.infer.decoding.rules import CONVERSIONS, Rules, UnusableSourceError, opaque
from megadit.models.shared.errors import UserError

PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
"""Bytes of one text, of which editors write long ones: Pillow limits all together to the same."""
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
_MORE_FORMATS = ("AVIF", "JPEG2000", "QOI", "DIB", "HEIF", "JXL")
"""Formats that only some builds of Pillow and its plugins read."""
UNREADABLE = "it is not a picture in a format that Pillow supports here"
_APP1 = "Raw profile type APP1"
"""EXIF in a PNG of ImageMagick, whose other name alone Pillow reads."""
_EXIF_BOX, _MAX_EXIF, _MOST_BOXES = b"JpgTiffExif->JP2", 1 << 16, 1000
_CODES = {"PNG": (b"\0\0\0\x04cICP", ">BB"), "AVIF": (b"colrnclx", ">HH"), "HEIF": (b"colrnclx", ">HH")}
"""Format -> what precedes the numbers in H.273 of a picture's primaries and transfer, and their form."""
_CODES_WITHIN = 1 << 16
_SRGB = 1, 13
_GREY_STEPS = {"L;2": 85, "L;4": 17}
"""Form of a PNG's grey -> step between its values, by which Pillow does not multiply the transparent one."""
_OF_COLOURS = ("icc_profile", "gamma", "chromaticity", "srgb")
_WHITE_IS_ZERO = 0
_PHOTOMETRIC = 262
"""TIFF tag that says whether zero is white."""


def read_picture(
    file: BinaryIO,
    rules: Rules,
    formats: tuple[str, ...] | None = None,
    check: Callable[[int, int], None] = lambda width, height: None,
) -> Image.Image:
    """Read the picture of a file (positioned at its start), in RGB; `check` may refuse a width and height first.

    Raises:
        UnusableSourceError: if it cannot be decoded, or is too large.
    """
    try:
        size = webp_size(check_searched(file))
        if size is not None:  # its decoder allocates the whole picture before its size can be checked
            rules.check(*size)
            check(*size)
        file.seek(0)
        image = Image.open(file, formats=formats or _readable_formats())
        rules.check(image.width, image.height)
        check(image.width, image.height)
        if image.format == "JPEG2000":  # of which Pillow reads no EXIF
            image.info["exif"] = _exif_of_boxes(file)
        elif _APP1 in image.info:
            image.info.setdefault("Raw profile type exif", image.info[_APP1])
        if image.format == "PNG" and image.tile and isinstance(hidden := image.info.get("transparency"), int):
            image.info["transparency"] = hidden * _GREY_STEPS.get(image.tile[0].args, 1)
        with suppress(SyntaxError):  # of damaged EXIF, which is not asked again
            image.getexif()
        upright = ImageOps.exif_transpose(image)
        grey = _eight_bits(upright, image)
        primaries, transfer = _codes(file, image)
        coded = coded_to_srgb(grey, transfer, primaries)
        colours = coded if coded is not grey else gamma_to_srgb(profile_to_srgb(grey))
        shown = opaque(colours, rules)
        changes = {
            "deep grey": grey is not upright,
            conversion(transfer, primaries): coded is not grey,
            "colour profile": colours is not coded,
        }
        shown.info[CONVERSIONS] = tuple(name for name, is_changed in changes.items() if is_changed)
        return shown
    except (UnusableSourceError, UserError):
        raise
    except Image.UnidentifiedImageError:
        raise UnusableSourceError("broken", UNREADABLE) from None
    except Exception as error:  # decoders raise any exception
        raise UnusableSourceError("broken", f"{type(error).__name__}: {error}") from None


def check_searched(file: BinaryIO) -> bytes:
    """The first 30 bytes of a file, for `webp_size`.

    Raises:
        UnusableSourceError: if it is large, and a picture that Pillow reads or searches whole to find its size.
    """
    head = file.read(30)
    if head.startswith(b"\xff\xd8") or head[4:8] == b"ftyp" or webp_size(head) is not None:
        check_bytes(file)
    return head


def _exif_of_boxes(file: BinaryIO) -> bytes:
    """The EXIF of a JPEG 2000, in the box by which ExifTool and Exiv2 mark it; b"": none."""
    place, end = 0, file.seek(0, io.SEEK_END)
    for _ in range(_MOST_BOXES):
        if place + len(_EXIF_BOX) >= end:
            break
        file.seek(place)
        size, kind = struct.unpack(">I4s", file.read(8))
        size = struct.unpack(">Q", file.read(8))[0] if size == 1 else size or end - place
        if kind == b"uuid" and file.read(len(_EXIF_BOX)) == _EXIF_BOX:
            return b"Exif\0\0" + file.read(min(size, _MAX_EXIF))
        place += max(size, 8)
    return b""


def _codes(file: BinaryIO, image: Image.Image) -> tuple[int, int]:
    """The numbers of a picture's primaries and transfer; those of sRGB for one without, which may have a profile."""
    mark, form = _CODES.get(image.format or "", (b"", ""))
    if not mark or (image.format != "PNG" and image.info.get("icc_profile")):  # in a PNG they precede its profile
        return _SRGB
    file.seek(0)
    head = file.read(_CODES_WITHIN)
    _, found, numbers = (head.partition(b"IDAT")[0] if image.format == "PNG" else head).partition(mark)
    size = struct.calcsize(form)
    return struct.unpack(form, numbers[:size]) if found and len(numbers) >= size else _SRGB


@cache
def _readable_formats() -> tuple[str, ...]:
    for plugin, register in (("pillow_heif", "register_heif_opener"), ("pillow_jxl", "")):
        with suppress(ImportError):
            found = import_module(plugin)
            if register:
                getattr(found, register)()
    Image.init()
    return tuple(name for name in (*IMAGE_FORMATS, *_MORE_FORMATS) if name in Image.OPEN)


def _eight_bits(image: Image.Image, original: Image.Image) -> Image.Image:
    """Convert grey of 16 or 32 bits, or of floating point, to 8 bits."""
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image).astype(np.float64)
    light = values / _white(values, image.mode)
    if getattr(original, "tag_v2", {}).get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        light = 1 - light
    shown = Image.fromarray((light * 255).round().astype(np.uint8))
    shown.info = {name: value for name, value in image.info.items() if name in _OF_COLOURS}
    hidden = image.info.get("transparency")
    if isinstance(hidden, int):
        shown.putalpha(Image.fromarray(np.where(values == hidden, 0, 255).astype(np.uint8)))
    return shown


def _white(values: np.ndarray, mode: str) -> float:
    """The value of white.

    Raises:
        UnusableSourceError: if the file does not say.
    """
    low, high = (values.min(), values.max()) if np.isfinite(values).all() else (-1.0, 1.0)
    is_whole = mode != "F" or (high > 1 and (values == values.round()).all())
    if low >= 0 and high <= 65535:
        if mode != "F" or (is_whole and high > 255):
            return 65535.0
        if high <= 1 or is_whole:
            return 1.0 if high <= 1 else 255.0
    raise UnusableSourceError("unknown range", f"the value of white is not known; values go from {low:g} to {high:g}")
