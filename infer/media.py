"""Images and videos that somebody sent, decoded within limits: nothing here trusts a byte.

Sizes, frames and seconds are checked before pixels are made, containers that lead to other files are not opened, and
whatever a decoder raises becomes one line. `MediaReader` does it in a process of its own, which a file may crash, hang
or fill without harm to anybody else.

Frames are uint8 THWC, RGB, 0..255: those that `read_video` gives of the same file.
"""

import io
import json
import os
import queue
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import IO

import av
import numpy as np
from PIL import Image

from megadit.infer.animations import animation_frames, webp_size
from megadit.infer.video_io import open_container
from megadit.models.given_settings import MediaLimits
from megadit.models.shared.errors import UserError
from megadit.models.shared.setting import settings_of

CONTAINERS = "mov,mp4,matroska,webm"
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
IMAGE_HEADS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF")
"""With which the images begin; everything else is tried as a video."""
_PROCESSOR_SECONDS = 20.0
"""That one file may take; the kernel ends a decoder that takes more."""
_SECONDS = 120.0
"""The same on the clock."""
_SECONDS_FOR_A_TURN = 30.0
_MOST_MEMORY = 3 << 30
"""Of a decoding process, beside twice the frames that the limits allow."""


def decode(data: bytes, limits: MediaLimits) -> np.ndarray:
    """Frames (uint8 THWC) of a png, jpg, webp, gif, mp4 or webm.

    Raises:
        UserError: for anything else, what is damaged, and what is beyond the limits.
    """
    if len(data) > limits.max_media_bytes:
        raise UserError(f"the file has {len(data):,} bytes; this service takes {limits.max_media_bytes:,}")
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


def within_total(decode: Callable[[bytes], np.ndarray], limits: MediaLimits) -> Callable[[bytes], np.ndarray]:
    """`decode` for the files of one request (uint8 THWC), which together may have so many pixels."""
    num_pixels = 0

    def counted(data: bytes) -> np.ndarray:
        nonlocal num_pixels
        frames = decode(data)
        num_pixels += frames.size // 3
        if num_pixels > limits.max_media_pixels:
            raise UserError(f"the files have more than the {limits.max_media_pixels:,} pixels that this service takes")
        return frames

    return counted


# --------------------------------------------------------------------------------------------- in another process


class MediaReader:
    """Decodes files in processes of its own, `num_processes` at once; they are started when they are needed."""

    def __init__(self, limits: MediaLimits, *, num_processes: int = 1) -> None:
        self.limits = limits = MediaLimits(**{name: getattr(limits, name) for name in settings_of(MediaLimits)})
        self._free: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for _ in range(num_processes):
            self._free.put(_Worker(limits))

    def read(self, data: bytes) -> np.ndarray:
        """As `decode`, but that a file which ends or holds up its decoder is refused like any other.

        Raises:
            UserError: as `decode`.
            TimeoutError: if no process became free.
        """
        if len(data) > self.limits.max_media_bytes:  # which need not be sent to be refused
            return decode(data, self.limits)
        try:
            worker = self._free.get(timeout=_SECONDS_FOR_A_TURN)
        except queue.Empty:
            raise TimeoutError("too many files are being read at the moment") from None
        try:
            return worker.read(data)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """Ends the processes, once they are free."""
        while not self._free.empty():
            self._free.get_nowait().end()


class _Worker:
    """One process; it lives until a file ends it, and is then started again."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._process: subprocess.Popen | None = None

    def read(self, data: bytes) -> np.ndarray:
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            answer, raw = self._exchange(data)
        except (OSError, EOFError, ValueError, struct.error):
            self.end()
            raise UserError("the file cannot be read: its decoder came to no end, or to a bad one") from None
        if "error" in answer:
            raise UserError(answer["error"])
        return np.frombuffer(raw, dtype=np.uint8).reshape(answer["shape"])

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> None:
        self.end()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, json.dumps(asdict(self._limits))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # each thread would reserve memory
        )

    def _exchange(self, data: bytes) -> tuple[dict, bytearray]:
        process, too_late = self._process, threading.Timer(_SECONDS, self._process.kill)
        too_late.start()
        try:
            _send(process.stdin, data)
            answer = json.loads(_receive(process.stdout, 1 << 16))
            return answer, _receive(process.stdout, 3 * self._limits.max_media_pixels)
        finally:
            too_late.cancel()


def _send(file: IO[bytes], data: bytes) -> None:
    file.write(struct.pack("<Q", len(data)))
    file.write(data)
    file.flush()


def _receive(file: IO[bytes], most: int) -> bytearray:
    """Raises EOFError where less comes than was announced, or more than `most` bytes are."""
    head = file.read(8)
    if len(head) < 8 or (length := struct.unpack("<Q", head)[0]) > most:
        raise EOFError
    data = bytearray(length)
    if file.readinto(data) < length:
        raise EOFError
    return data


def _work(limits: MediaLimits) -> None:
    """Answers until there is nobody left who asks."""
    memory = _MOST_MEMORY + 6 * limits.max_media_pixels
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a decoder prints is no answer
    while True:
        try:
            data = bytes(_receive(questions, limits.max_media_bytes))
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, _PROCESSOR_SECONDS)  # whose signal ends the process
        try:
            frames = decode(data, limits)
            answer = {"shape": frames.shape}
        except (UserError, MemoryError) as error:
            frames, answer = np.empty(0, np.uint8), {"error": str(error) or "the file takes too much memory to read"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(answers, json.dumps(answer).encode())
        _send(answers, np.ascontiguousarray(frames).data.cast("B") if frames.size else b"")


if __name__ == "__main__":
    _work(MediaLimits(**json.loads(sys.argv[1])))
