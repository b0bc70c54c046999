"""What the files of the table show, and how it is found again in their pixels.

A frame shows four fields, red, green, blue and grey, and at its lower edge its number in eight bits, so that order,
times, orientation and colours can be read from its pixels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HEIGHT, WIDTH, STRIP, COUNT, FPS = 64, 96, 16, 12, 24
FIELDS = ((200, 40, 40), (40, 180, 40), (40, 40, 200), (128, 128, 128))
Make = Callable[[Path], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A file, and what is to be seen in it."""

    name: str
    make: Make
    numbers: Sequence[int] | None = tuple(range(COUNT))
    """Of the frames that are seen; None: pictures that are not numbered."""
    fps: float = FPS
    """0: a picture."""
    size: tuple[int, int] = (HEIGHT, WIDTH)
    fields: Any = FIELDS
    """Top left, top right, bottom left, bottom right."""
    near: int = 8
    """How far a colour may be off, of 255."""
    refused: str = ""
    """Why nothing is seen."""
    clips_only: bool = False
    """Whether `prepare` uses what is whole of it, while other commands refuse it."""
    needs: tuple[str, ...] = ()
    """Encoders of ffmpeg, which not every build has."""


def picture(
    number: int, height: int = HEIGHT, width: int = WIDTH, fields: Any = FIELDS, kind: type = np.uint8
) -> np.ndarray:
    """HWC, 0..255."""
    shown = np.zeros((height, width, 3), kind)
    strip = height * STRIP // HEIGHT
    middle = (height - strip) // 2
    shown[:middle, : width // 2], shown[:middle, width // 2 :] = fields[0], fields[1]
    shown[middle : height - strip, : width // 2], shown[middle : height - strip, width // 2 :] = fields[2], fields[3]
    for bit in range(8):
        shown[height - strip :, bit * width // 8 : (bit + 1) * width // 8] = 235 * (number >> bit & 1)
    return shown


def number_of(shown: np.ndarray) -> int:
    """The number that a frame of any size shows."""
    height, width = shown.shape[:2]
    row = shown[height - STRIP * height // HEIGHT // 2 - 1]
    return sum((row[(2 * bit + 1) * width // 16].mean() > 110) << bit for bit in range(8))


def fields_of(shown: np.ndarray) -> np.ndarray:
    """The colours of the four fields: int [4, 3]."""
    height, width = shown.shape[:2]
    top, bottom = (height * share // 8 for share in (1, 4))
    return np.array([np.median(shown[y - 3 : y + 3, x - 3 : x + 3].reshape(-1, 3), axis=0)
                     for y in (top, bottom) for x in (width // 4, 3 * width // 4)]).round().astype(int)  # fmt: skip


def frames(count: int = COUNT, **options: Any) -> list[np.ndarray]:
    return [picture(number, **options) for number in range(count)]


def see_through(count: int = COUNT) -> list[np.ndarray]:
    """Frames whose green field hides behind transparency."""
    hidden = np.full((HEIGHT, WIDTH, 1), 255, np.uint8)
    hidden[: (HEIGHT - STRIP) // 2, WIDTH // 2 :] = 0
    return [np.concatenate([shown, hidden], axis=2) for shown in frames(count)]


MATRICES = {
    "upright": (1, 0, 0, 1), "rot90": (0, 1, -1, 0), "rot180": (-1, 0, 0, -1), "rot270": (0, -1, 1, 0),
    "hflip": (-1, 0, 0, 1), "vflip": (1, 0, 0, -1), "transpose": (0, 1, 1, 0), "transverse": (0, -1, -1, 0),
}  # fmt: skip
"""Name -> a, b, c, d: a player shows the pixel (x, y) at (ax + cy, bx + dy)."""


def stored_as(name: str, shown: np.ndarray) -> np.ndarray:
    """The pixels that a matrix turns into `shown`."""
    a, b, c, d = MATRICES[name]
    if a or d:
        return shown[::d, ::a]
    return shown[::b, ::c].transpose(1, 0, 2)
