"""Contact sheet: a grid of videos with captions."""

import math
import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_MARGIN = 6
_MOST_LINES = 12
_FONT_SIZE = 12
_LINE_HEIGHT = 14
_GAP = 3
"""Space below text, for descenders."""
_ROW_GAP = 14
"""Space above text, so that it is nearer to its own picture than to the one above."""
_SMALLEST = 128
"""Least pixels of a cell's longer side: small videos are enlarged by whole factors."""


def contact_sheet(
    videos: Sequence[np.ndarray], captions: Sequence[str], num_columns: int, *, num_lines: int | None = None
) -> np.ndarray:
    """Grid of videos of any sizes and lengths, `num_columns` in a row: uint8 [T, H, W, 3].

    T is that of the longest video; shorter ones stay at their last frame. Captions have at most `num_lines` lines;
    None: as many as the longest caption needs, up to a dozen.
    """
    videos = [_enlarged(video) for video in videos]
    height, width = (max(video.shape[axis] for video in videos) for axis in (1, 2))
    labels = [_wrapped(caption, width, _MOST_LINES if num_lines is None else num_lines) for caption in captions]
    num_lines = max(map(len, labels)) if num_lines is None else num_lines
    text_height = num_lines * _LINE_HEIGHT + (_GAP if num_lines else 0)
    cell = (height + text_height + (_ROW_GAP if num_lines else _MARGIN), width + _MARGIN)
    num_rows = -(-len(videos) // num_columns)
    page = Image.new("RGB", (cell[1] * num_columns + _MARGIN, cell[0] * num_rows + _MARGIN), "white")
    for place, label in enumerate(labels):
        _write(page, label, _corner(place, num_columns, cell))
    sheet = np.repeat(np.asarray(page)[None], max(map(len, videos)), axis=0)
    for place, video in enumerate(videos):
        top, left = _corner(place, num_columns, cell)
        top += text_height
        frames = np.concatenate([video, np.repeat(video[-1:], len(sheet) - len(video), axis=0)])
        sheet[:, top : top + video.shape[1], left : left + video.shape[2]] = frames
    return sheet


def under_heading(sheet: np.ndarray, heading: str) -> np.ndarray:
    """A sheet, THWC, below one line of text."""
    strip = Image.new("RGB", (sheet.shape[2], _LINE_HEIGHT + 2 * _MARGIN), "white")
    _write(strip, _wrapped(heading, sheet.shape[2] - 2 * _MARGIN, 1), (_MARGIN, _MARGIN))
    return np.concatenate([np.repeat(np.asarray(strip)[None], len(sheet), axis=0), sheet], axis=1)


def grid_columns(count: int) -> int:
    """Number of columns that makes a grid of `count` videos about as wide as high."""
    return max(1, math.ceil(math.sqrt(count)))


def middle_frame(video: np.ndarray) -> np.ndarray:
    return video[len(video) // 2][None]


def _enlarged(video: np.ndarray) -> np.ndarray:
    factor = max(1, round(_SMALLEST / max(video.shape[1:3])))
    return video.repeat(factor, axis=1).repeat(factor, axis=2)


def _corner(place: int, num_columns: int, cell: tuple[int, int]) -> tuple[int, int]:
    row, column = divmod(place, num_columns)
    return _MARGIN + row * cell[0], _MARGIN + column * cell[1]


def _wrapped(caption: str, width: int, num_lines: int) -> list[str]:
    """Lines of a text, wrapped at `width` pixels; at most `num_lines`."""
    if not num_lines:
        return []
    letters = max(4, int(width / _font().getlength("n")))
    lines = [part for line in caption.splitlines() for part in textwrap.wrap(line, letters)]
    rest = "\n".join(lines[num_lines - 1 :])
    return [*lines[: num_lines - 1], *textwrap.wrap(rest, letters, max_lines=1, placeholder="…")]


def _write(page: Image.Image, lines: Sequence[str], corner: tuple[int, int]) -> None:
    for number, line in enumerate(lines):
        ImageDraw.Draw(page).text((corner[1], corner[0] + number * _LINE_HEIGHT), line, fill="black", font=_font())


def _font() -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(_FONT_SIZE)
