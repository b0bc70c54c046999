"""Pictures that move: which WebP, PNG and GIF files do, and the frames of WebP, which ffmpeg does not decode."""

from collections.abc import Iterator
from fractions import Fraction
from typing import BinaryIO

import av
import numpy as np
from PIL import Image

from megadit.infer.animations import is_webp
from megadit.train.data.ingest.pool import still_alive

HEAD_BYTES = 4096
"""Of a file that `is_animated` wants to see."""
SUFFIXES = (".webp", ".png", ".apng")
"""Of pictures that may move; a .gif counts as a video whatever it holds."""
MAX_BYTES = 1 << 28
"""Of a WebP, which its decoder reads whole."""
DEFAULT_MILLISECONDS = 100
"""Of frames that give no time, as browsers show them."""


def is_animated(head: bytes) -> bool:
    """Whether the picture that begins so shows several frames."""
    if is_webp(head):
        return head[12:16] == b"VP8X" and bool(head[20:21]) and bool(head[20] & 2)
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return b"acTL" in head.partition(b"IDAT")[0]
    return head.startswith(b"GIF8") and b"NETSCAPE2.0" in head


class WebpVideo:
    """An animated WebP, read as `decode` reads videos."""

    time_base = Fraction(1, 1000)
    pixel_aspect = 1.0

    def __init__(self, file: BinaryIO) -> None:
        """Raises ValueError for one that does not move, or is too large to try."""
        if file.seek(0, 2) > MAX_BYTES:
            raise ValueError(f"an animation of more than {MAX_BYTES >> 20} MiB")
        self._file = file
        self._milliseconds = [duration or DEFAULT_MILLISECONDS for duration in _durations(file)]
        if not self._milliseconds:
            raise ValueError("it does not move")

    @property
    def fps(self) -> float:
        return 1000 * len(self._milliseconds) / sum(self._milliseconds)

    def seek(self, pts: int) -> bool:
        """False: frames build on one another from the first."""
        return False

    def frames(self) -> Iterator[av.VideoFrame]:
        """In RGB, or RGBA; what follows a damaged frame is left out."""
        self._file.seek(0)
        with Image.open(self._file, formats=["WEBP"]) as image:
            start = 0
            for number, duration in enumerate(self._milliseconds):
                still_alive()
                try:
                    image.seek(number)
                    mode = "RGBA" if image.has_transparency_data else "RGB"
                    frame = av.VideoFrame.from_ndarray(
                        np.asarray(image.convert(mode)), format={"RGBA": "rgba", "RGB": "rgb24"}[mode]
                    )
                except (EOFError, OSError, ValueError):
                    return
                frame.pts, frame.time_base = start, self.time_base
                yield frame
                start += duration


def _durations(file: BinaryIO) -> Iterator[int]:
    """Milliseconds of each frame: its chunk (ANMF) begins with place and size, twelve bytes, and then its duration."""
    place = 12
    while True:
        file.seek(place)
        head = file.read(8 + 15)
        if len(head) < 8:
            return
        if head[:4] == b"ANMF":
            yield int.from_bytes(head[20:23], "little")
        size = int.from_bytes(head[4:8], "little")
        place += 8 + size + size % 2
