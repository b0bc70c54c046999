"""Rules for every file that is read: limits, the background, and the error for unusable files."""

from dataclasses import dataclass

from PIL import Image

MAX_PIXELS = 1 << 27
"""Most pixels of a picture, slightly more than 15360x8640."""
PIXELS_PER_BYTE, FREE_PIXELS = 100_000, 10_000_000_000
"""Most pixels of frames for each byte that they are decoded from, and in addition to these: a recording of a still
screen has half as many, and an animation of single dots on a large canvas, without them, keeps a decoder busy for days.
"""

VIDEO_SUFFIXES = tuple(
    ".mp4 .m4v .mov .mkv .webm .avi .mpg .mpeg .ts .flv .ogv .wmv .gif "
    ".mts .m2ts .m2t .3gp .3g2 .vob .mxf .y4m .m1v .m2v .h264 .264 .h265 .hevc .ivf .f4v .asf .qt .dv .mpe "
    ".mjpeg .mjpg .nut .obu".split()
)
"""Suffixes of files that are read as videos."""
IMAGE_SUFFIXES = tuple(
    ".jpg .jpeg .png .webp .bmp .tif .tiff .ppm .jpe .jfif .pgm .pbm .pnm .gif .tga .jp2 .j2k .jpx .avif .heic "
    ".heif .jxl .mpo .dib .qoi".split()
)
"""Suffixes of files that are read as pictures; of a GIF it is not known."""

TRANSPARENT = "transparent"
"""Key in `info` of an image that was transparent."""
CONVERSIONS = "conversions"
"""Key in `info` of an image: names of its conversions to sRGB, for statistics."""


class UnusableSourceError(ValueError):
    """A file that gives no frames. `reason` is one of a few categories, for statistics; `detail` says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    background: str = "black"
    """Colour behind transparent pixels."""
    max_pixels: float = MAX_PIXELS
    """Most pixels of one picture; larger ones are not decoded."""

    def check(self, width: int, height: int) -> None:
        """Raises UnusableSourceError for a picture that is empty or too large."""
        if not width * height:
            raise UnusableSourceError("broken", "its pictures have no size")
        if width * height > self.max_pixels:
            raise UnusableSourceError(
                "too large", f"{width}x{height} pixels; at most {self.max_pixels / 1e6:g} megapixels"
            )


class Work:
    """Pixels of the frames decoded from one file, limited by their bytes."""

    def __init__(self) -> None:
        self._left = FREE_PIXELS

    def add(self, num_bytes: int, num_pixels: int) -> None:
        """Raises UnusableSourceError for too many pixels from too few bytes."""
        self._left += PIXELS_PER_BYTE * num_bytes - num_pixels
        if self._left < 0:
            raise UnusableSourceError(
                "decompression bomb", f"its frames unfold to over {PIXELS_PER_BYTE:,} pixels for each byte"
            )


def opaque(image: Image.Image, rules: Rules) -> Image.Image:
    """The picture in RGB, blended with the background where transparent."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("LA") if image.mode == "La" else image
    image = image.convert("RGBA")
    if image.getextrema()[3][0] == 255:
        return image.convert("RGB")
    ground = Image.new("RGBA", image.size, rules.background)
    shown = Image.alpha_composite(ground, image).convert("RGB")
    shown.info[TRANSPARENT] = True
    return shown
