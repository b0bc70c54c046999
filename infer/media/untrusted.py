"""Decodes untrusted images and videos within limits.

Sizes, frames and seconds are checked before pixels are decoded, containers that refer to other files are not opened,
and any exception of a decoder becomes one line. Run as a program, it is the process of a `MediaReader`.

Frames are uint8 THWC, RGB, 0..255, as `read_video` reads them.
"""

import io
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

from megadit.infer.decoding.rules import Rules, UnusableSourceError
from megadit.infer.decoding.sampling import read_all
from megadit.infer.media.reader import CHECKING, check_bytes, receive, send
from megadit.models.diffusion.conditioning_settings import MediaLimits
from megadit.models.shared.errors import UserError

CONTAINERS = "mov,mp4,matroska,webm,gif,apng"
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")
_PROCESSOR_SECONDS = 20.0
"""Seconds of processor time for one file; the kernel ends a decoder that takes more."""
_LEAST_CLAIM = 19
"""Niceness of a process that only checks."""
_MOST_MEMORY = 3 << 30
"""Bytes of memory of a decoding process, in addition to twice the frames that the limits allow."""


def decode(data: bytes, limits: MediaLimits) -> np.ndarray:
    """Frames (uint8 THWC) of a png, jpg, webp, gif, mp4 or webm.

    Raises:
        UserError: for other formats, damaged files, and files beyond the limits.
    """
    check_bytes(data, limits)

    def check(num_frames: int, height: int, width: int, seconds: float) -> None:
        check_size(num_frames, height, width, limits)
        _check_seconds(seconds, limits)

    rules = Rules(max_pixels=limits.max_media_pixels)
    try:
        return read_all(io.BytesIO(data), rules, check, containers=CONTAINERS, formats=IMAGE_FORMATS)[0]
    except UserError:
        raise
    except UnusableSourceError as error:
        if error.reason == "broken":
            raise UserError("the file is no png, jpg, webp, gif, mp4 or webm that can be read") from None
        raise UserError(f"the file cannot be used; {error}") from None
    except Exception:  # decoders raise any exception
        raise UserError("the file is no png, jpg, webp, gif, mp4 or webm that can be read") from None


def check_size(num_frames: int, height: int, width: int, limits: MediaLimits) -> None:
    """Raises UserError for frames that are too large, too many, or empty."""
    if not 0 < height <= limits.max_media_side or not 0 < width <= limits.max_media_side:
        raise UserError(
            f"frames of {width}x{height}; this service takes sides of 1 to {limits.max_media_side:,} pixels"
        )
    if num_frames > limits.max_media_frames:
        raise UserError(f"the file has more than the {limits.max_media_frames:,} frames that this service takes")
    if num_frames * height * width > limits.max_media_pixels:
        raise UserError(
            f"{num_frames:,} frames of {width}x{height} or more are beyond the {limits.max_media_pixels:,} pixels that "
            "this service takes: send fewer or smaller ones"
        )


def _check_seconds(seconds: float, limits: MediaLimits) -> None:
    if not seconds <= limits.max_media_seconds:
        raise UserError(f"the video runs for {seconds:,.0f} s; this service takes {limits.max_media_seconds:g} s")


def _work(limits: MediaLimits, is_checking: bool) -> None:
    """Serves requests until the input ends."""
    if is_checking:
        os.nice(_LEAST_CLAIM)
        with suppress(OSError):  # Linux shares cores among sessions first: in its own, this one counts as least
            os.setsid()
            Path("/proc/self/autogroup").write_text(str(_LEAST_CLAIM), encoding="utf-8")
    memory = _MOST_MEMORY + 6 * limits.max_media_pixels
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # decoders may print; stdout is for responses
    while True:
        try:
            data = bytes(receive(questions, limits.max_media_bytes))
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, _PROCESSOR_SECONDS)  # its signal ends the process
        try:
            frames = decode(data, limits)
            answer = {"shape": frames.shape}
        except (UserError, MemoryError) as error:
            frames, answer = np.empty(0, np.uint8), {"error": str(error) or "the file takes too much memory to read"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(replies, json.dumps(answer).encode())
        send(replies, np.ascontiguousarray(frames).data.cast("B") if frames.size and not is_checking else b"")


if __name__ == "__main__":
    _work(MediaLimits(**json.loads(sys.argv[1])), CHECKING in sys.argv[2:])
