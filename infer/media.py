"""Images and videos that somebody sent, decoded within limits: nothing here trusts a byte.

Sizes, frames and seconds are checked before pixels are made, containers that lead to other files are not opened, and
whatever a decoder raises becomes one line. As a program it is the process that a `MediaReader` asks.

Frames are uint8 THWC, RGB, 0..255: those that `read_video` gives of the same file.
"""

import io
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator

import av
import numpy as np
from PIL import Image

from megadit.infer.animations import animation_frames, webp_size
from megadit.infer.media_reader import CHECKING, check_bytes, receive, send
from megadit.infer.video_io import open_container
from megadit.models.given_settings import IMAGE_HEADS, MediaLimits
from megadit.models.shared.errors import UserError

CONTAINERS = "mov,mp4,matroska,webm"
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_PROCESSOR_SECONDS = 20.0
"""That one file may take; the kernel ends a decoder that takes more."""
_LEAST_CLAIM = 19
"""On a core, as `nice` counts."""
_MOST_MEMORY = 3 << 30
"""Of a decoding process, beside twice the frames that the limits allow."""


def decode(data: bytes, limits: MediaLimits) -> np.ndarray:
    """Frames (uint8 THWC) of a png, jpg, webp, gif, mp4 or webm.

    Raises:
        UserError: for anything else, what is damaged, and what is beyond the limits.
    """
    check_bytes(data, limits)
    read = _image if data.startswith(IMAGE_HEADS) else _video
    try:
        frames = read(data, limits)
    except UserError:
        raise
    except Exception:  # decoders raise whatever they like
        raise UserError("the file is no png, jpg, webp, gif, mp4 or webm that can be read") from None
    if not len(frames):
        raise UserError("the file holds no frame that can be read")
    return frames


def _image(data: bytes, limits: MediaLimits) -> np.ndarray:
    size = webp_size(data[:30])
    if size is not None:  # its decoder makes room for the whole before anybody can ask how large it is
        check_size(1, size[1], size[0], limits)
    with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:

        def check(num_frames: int) -> None:
            check_size(num_frames, image.height, image.width, limits)

        return animation_frames(image, check)[0]


def _video(data: bytes, limits: MediaLimits) -> np.ndarray:
    with open_container(io.BytesIO(data), containers=CONTAINERS, max_pixels=limits.max_media_pixels) as container:
        if not container.streams.video:
            raise UserError("the file holds no video")
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        check_size(1, stream.height, stream.width, limits)
        seconds = max((container.duration or 0) / av.time_base, float((stream.duration or 0) * (stream.time_base or 0)))
        _check_seconds(seconds, limits)
        return np.stack(list(_within(container.decode(stream), limits)))


def _within(frames: Iterator[av.VideoFrame], limits: MediaLimits) -> Iterator[np.ndarray]:
    """Frames HWC, as long as they are of one size and within the limits."""
    size = None
    for number, frame in enumerate(frames):
        size = size or (frame.height, frame.width)
        if (frame.height, frame.width) != size:
            raise UserError("the frames of the video are of several sizes")
        check_size(number + 1, *size, limits)
        _check_seconds(frame.time or 0.0, limits)
        yield frame.to_ndarray(format="rgb24")


def check_size(num_frames: int, height: int, width: int, limits: MediaLimits) -> None:
    """Raises UserError for frames that are too large, too many, or nothing."""
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
    """Answers until there is nobody left who asks."""
    if is_checking:
        os.nice(_LEAST_CLAIM)
    memory = _MOST_MEMORY + 6 * limits.max_media_pixels
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a decoder prints is no answer
    while True:
        try:
            data = bytes(receive(questions, limits.max_media_bytes))
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, _PROCESSOR_SECONDS)  # whose signal ends the process
        try:
            frames = decode(data, limits)
            answer = {"shape": frames.shape}
        except (UserError, MemoryError) as error:
            frames, answer = np.empty(0, np.uint8), {"error": str(error) or "the file takes too much memory to read"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(answers, json.dumps(answer).encode())
        send(answers, np.ascontiguousarray(frames).data.cast("B") if frames.size and not is_checking else b"")


if __name__ == "__main__":
    _work(MediaLimits(**json.loads(sys.argv[1])), CHECKING in sys.argv[2:])
