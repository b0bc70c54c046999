"""Animated WebP, PNG, GIF and AVIF: detection and frame rate; frames of WebP, which ffmpeg does not decode."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import BinaryIO

import av
import numpy as np
from PIL import Image

from megadit.infer.decoding.frame import Frame
from megadit.infer.decoding.rules import Rules, UnusableSourceError, Work

HEAD_BYTES = 4096
"""Bytes from the beginning of a file that `is_animated` needs."""
SUFFIXES = (".webp", ".png", ".apng", ".avif")
"""Suffixes of pictures that may be animated; a .gif always counts as a video."""
MAX_BYTES = 1 << 28
"""Most bytes of an animation: decoders read a WebP whole, and a frame of a GIF up to its end."""
DEFAULT_MILLISECONDS = 100
"""Duration of frames without one, as in browsers."""


def is_animated(head: bytes) -> bool:
    """Whether a picture that begins with `head` is animated."""
    if is_webp(head):
        return head[12:16] == b"VP8X" and bool(head[20:21]) and bool(head[20] & 2)
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return b"acTL" in head.partition(b"IDAT")[0]
    return head[4:12] == b"ftypavis" or (head.startswith(b"GIF8") and b"NETSCAPE2.0" in head)


def is_webp(head: bytes) -> bool:
    return head[:4] == b"RIFF" and head[8:12] == b"WEBP"


def webp_size(head: bytes) -> tuple[int, int] | None:
    """(width, height) in the first 30 bytes of a WebP; None for another file."""
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


def rate(durations: Sequence[int], time_base: Fraction) -> float:
    """Frames per second of an animation with these frame durations in ticks.

    If all are multiples of the shortest, that is one frame: writers join equal frames. Else the average.
    """
    shortest = min(durations)
    if all(duration % shortest == 0 for duration in durations):
        return float(1 / (shortest * time_base))
    return float(len(durations) / (sum(durations) * time_base))


class WebpVideo:
    """An animated WebP, with the interface of `video.Video`."""

    time_base = Fraction(1, 1000)
    is_regular = True

    def __init__(self, file: BinaryIO, rules: Rules, beat: Callable[[], None]) -> None:
        """Raises ValueError if it is not animated, or too large (UnusableSourceError)."""
        check_bytes(file)
        self._file, self._rules, self._beat = file, rules, beat
        self._frames = [(duration or DEFAULT_MILLISECONDS, size) for duration, size in _durations(file)]
        if not self._frames:
            raise ValueError("it is not animated")

    @property
    def fps(self) -> float:
        return rate([duration for duration, _ in self._frames], self.time_base)

    @property
    def seconds(self) -> float:
        return sum(duration for duration, _ in self._frames) / 1000

    def seek(self, time: int) -> bool:
        """False: every frame depends on the ones before it."""
        return False

    def frames(self) -> Iterator[Frame]:
        """Yield the frames in RGB or RGBA, up to the first damaged one."""
        self._file.seek(0)
        work = Work()
        with Image.open(self._file, formats=["WEBP"]) as image:
            start = 0
            for number, (duration, size) in enumerate(self._frames):
                self._beat()
                work.add(size, image.width * image.height)
                try:
                    image.seek(number)
                    mode = "RGBA" if image.has_transparency_data else "RGB"
                    pixels = av.VideoFrame.from_ndarray(
                        np.asarray(image.convert(mode)), format={"RGBA": "rgba", "RGB": "rgb24"}[mode]
                    )
                except (EOFError, OSError, ValueError):
                    return
                yield Frame(pixels=pixels, time=start, duration=duration, rules=self._rules)
                start += duration


def check_bytes(file: BinaryIO) -> None:
    """Raises UnusableSourceError for a file that is too large for an animation, or a picture that is read whole."""
    if file.seek(0, 2) > MAX_BYTES:
        raise UnusableSourceError("large file", f"more than {MAX_BYTES >> 20} MiB, which its decoder reads at once")
    file.seek(0)


def _durations(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Milliseconds and bytes of each frame: its chunk (ANMF) begins with place and size, twelve bytes, and then its
    duration."""
    place = 12
    while True:
        file.seek(place)
        head = file.read(8 + 15)
        if len(head) < 8:
            return
        size = int.from_bytes(head[4:8], "little")
        if head[:4] == b"ANMF":
            yield int.from_bytes(head[20:23], "little"), size
        place += 8 + size + size % 2
