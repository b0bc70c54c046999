"""A frame of a video as shown: upright, with square pixels, in RGB, on a background."""

import struct
from dataclasses import dataclass
from functools import cached_property

import av
import numpy as np
from av.sidedata.sidedata import Type as SideDataType
from PIL import Image

from megadit.infer.decoding.colour import conversion, to_screen
from megadit.infer.decoding.rules import TRANSPARENT, Rules, opaque


def _unnamed(value: int) -> SideDataType:
    member = object.__new__(SideDataType)
    member._name_, member._value_ = f"UNNAMED_{value}", value
    return member


SideDataType._missing_ = _unnamed  # EXIF of JPEGs and views of spatial videos have no names in PyAV, which raises

_UNSPECIFIED, _ITU709 = 2, 1
_HD_LINES, _HD_COLUMNS = 720, 1280
"""Size from which on players assume BT.709 for colours without a stated matrix."""


@dataclass(kw_only=True)
class Frame:
    pixels: av.VideoFrame
    time: int
    """Presentation time, in ticks of its video."""
    rules: Rules
    duration: int = 0
    """Duration in ticks; 0 where it is not known."""
    aspect: float = 1.0
    """Width of a pixel by its height."""
    alpha_HW: np.ndarray | None = None
    """Alpha channel, where it is a separate stream."""
    is_damaged: bool = False
    follows_loss: bool = False
    """Whether frames just before it could not be decoded."""
    is_deinterlaced: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) as shown by players."""
        width = round(self.pixels.width * self.aspect)
        return (width, self.pixels.height) if self._turn[0] else (self.pixels.height, width)

    @property
    def is_transparent(self) -> bool:
        """Whether any pixel is transparent."""
        return self._opaque is not self.pixels

    @property
    def conversions(self) -> tuple[str, ...]:
        """Names of the conversions to sRGB that were made, for statistics."""
        return tuple(filter(None, ("interlaced" if self.is_deinterlaced else "", self._conversion)))

    def fitted(self, height: int, width: int) -> np.ndarray:
        """Frame resized to cover height x width, then centre-cropped: uint8 HWC."""
        is_transposed, flips_columns, flips_rows = self._turn
        if is_transposed:
            height, width = width, height
        shown_width = self.pixels.width * self.aspect
        scale = max(height / self.pixels.height, width / shown_width)
        scaled_height, scaled_width = (
            max(height, round(self.pixels.height * scale)),
            max(width, round(shown_width * scale)),
        )
        picture = self._scaled(scaled_height, scaled_width, self._rgb)
        top, left = (scaled_height - height) // 2, (scaled_width - width) // 2
        picture = self._on_screen(picture[top : top + height, left : left + width])
        picture = picture.transpose(1, 0, 2) if is_transposed else picture
        return np.ascontiguousarray(picture[:: -1 if flips_rows else 1, :: -1 if flips_columns else 1])

    def thumbnail(self, side: int) -> tuple[np.ndarray, np.ndarray]:
        """Luma and chroma, side x side, as stored: neither rotated nor in the frame's aspect ratio."""
        colours = self._on_screen(self._scaled(side, side, self._rgb))
        if self._conversion:
            return np.asarray(Image.fromarray(colours).convert("L")), colours
        return self._scaled(side, side, "gray"), colours

    def _scaled(self, height: int, width: int, format: str) -> np.ndarray:
        shown = self._opaque
        is_hd = format != "gray" and (shown.height >= _HD_LINES or shown.width >= _HD_COLUMNS)
        space = _ITU709 if is_hd and shown.colorspace == _UNSPECIFIED and not shown.format.is_rgb else None
        scaled = shown.reformat(width, height, format=format, interpolation="AREA", src_colorspace=space, threads=1)
        return scaled.to_ndarray()

    def _on_screen(self, picture_HWC: np.ndarray) -> np.ndarray:
        if not self._conversion:
            return picture_HWC
        return to_screen(picture_HWC, self.pixels.color_trc, self.pixels.color_primaries)

    @property
    def _rgb(self) -> str:
        return "rgb48le" if self._conversion else "rgb24"

    @cached_property
    def _conversion(self) -> str:
        return conversion(self.pixels.color_trc, self.pixels.color_primaries)

    @cached_property
    def _opaque(self) -> av.VideoFrame:
        """Pixels of the frame, blended with the background where transparent."""
        kind = self.pixels.format
        if self.alpha_HW is None and not (kind.has_palette or any(part.is_alpha for part in kind.components)):
            return self.pixels
        rgba_HWC = self.pixels.to_ndarray(format="rgba", threads=1)
        if self.alpha_HW is not None:
            rgba_HWC[..., 3] = self.alpha_HW
        shown = opaque(Image.fromarray(rgba_HWC, "RGBA"), self.rules)
        return av.VideoFrame.from_image(shown) if TRANSPARENT in shown.info else self.pixels

    @cached_property
    def _turn(self) -> tuple[bool, bool, bool]:
        """Rotation of the display matrix as (transpose, reverse columns, reverse rows), in this order."""
        matrix = self.pixels.side_data.get("DISPLAYMATRIX")
        if matrix is None:
            return False, False, False
        a, b, _, c, d = struct.unpack("=5i", bytes(matrix)[:20])
        if abs(a) + abs(d) >= abs(b) + abs(c):
            return False, a < 0, d < 0
        return True, c < 0, b < 0
