"""One picture of many videos, in rows and columns under their names."""

import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_MARGIN = 6
_LINES = 2
_FONT_SIZE = 12
_LINE_HEIGHT = 14
_GAP = 3
"""Below text: what letters hang down."""
_SMALLEST = 128
"""Pixels that the longer side of a cell has at least: small videos are enlarged by whole factors."""


def contact_sheet(
    videos: Sequence[np.ndarray], captions: Sequence[str], num_columns: int, *, num_lines: int = _LINES
) -> np.ndarray:
    """uint8 [T, H, W, 3] from videos of any sizes and lengths, `num_columns` of them in a row.

    As long as the longest; shorter ones stay at their last frame. Captions have room for `num_lines`.
    """
    videos = [_enlarged(video) for video in videos]
    height, width = (max(video.shape[axis] for video in videos) for axis in (1, 2))
    text_height = num_lines * _LINE_HEIGHT + (_GAP if num_lines else 0)
    cell = (height + text_height + _MARGIN, width + _MARGIN)
    num_rows = -(-len(videos) // num_columns)
    page = Image.new("RGB", (cell[1] * num_columns + _MARGIN, cell[0] * num_rows + _MARGIN), "white")
    for place, caption in enumerate(captions):
        _write(page, caption, _corner(place, num_columns, cell), width, num_lines)
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
    _write(strip, heading, (_MARGIN, _MARGIN), sheet.shape[2] - 2 * _MARGIN, 1)
    return np.concatenate([np.repeat(np.asarray(strip)[None], len(sheet), axis=0), sheet], axis=1)


def middle_frame(video: np.ndarray) -> np.ndarray:
    return video[len(video) // 2][None]


def _enlarged(video: np.ndarray) -> np.ndarray:
    factor = max(1, round(_SMALLEST / max(video.shape[1:3])))
    return video.repeat(factor, axis=1).repeat(factor, axis=2)


def _corner(place: int, num_columns: int, cell: tuple[int, int]) -> tuple[int, int]:
    row, column = divmod(place, num_columns)
    return _MARGIN + row * cell[0], _MARGIN + column * cell[1]


def _write(page: Image.Image, caption: str, corner: tuple[int, int], width: int, num_lines: int) -> None:
    if not num_lines:
        return
    font = ImageFont.load_default(_FONT_SIZE)
    letters = max(4, int(width / font.getlength("n")))
    lines = textwrap.wrap(caption, letters, max_lines=num_lines, placeholder="…")
    for number, line in enumerate(lines):
        ImageDraw.Draw(page).text((corner[1], corner[0] + number * _LINE_HEIGHT), line, fill="black", font=font)
