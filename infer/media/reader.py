"""Decodes uploaded files in separate processes, so that a file that crashes or hangs its decoder harms no other.

The decoder (`untrusted.py`) is loaded only there. A request is a file's bytes; a response is JSON, and the frames.
"""

import json
import math
import os
import queue
import struct
import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, TypeVar

import numpy as np

from megadit.models.diffusion.conditioning_settings import MediaLimits
from megadit.models.shared.cli.command import python_module
from megadit.models.shared.cli.setting import settings_of
from megadit.models.shared.errors import UserError

CHECKING = "--checking"
"""Argument of a process that returns no frames, and runs at the lowest priority."""
_SECONDS = 120.0
"""Seconds of wall-clock time for one file."""
_SECONDS_FOR_A_TURN = 30.0


def check_bytes(data: bytes, limits: MediaLimits) -> None:
    """Raises UserError for a file that is too large."""
    if len(data) > limits.max_media_bytes:
        raise UserError(f"the file has {len(data):,} bytes; this service takes {limits.max_media_bytes:,}")


_Decoded = TypeVar("_Decoded", np.ndarray, int)


def within_total(decode: Callable[[bytes], _Decoded], limits: MediaLimits) -> Callable[[bytes], _Decoded]:
    """Wrap `decode`, which returns frames (uint8 THWC) or their number of pixels, to limit the total pixels of the
    files of one request."""
    num_pixels = 0

    def counted(data: bytes) -> _Decoded:
        nonlocal num_pixels
        frames = decode(data)
        num_pixels += frames if isinstance(frames, int) else frames.size // 3
        if num_pixels > limits.max_media_pixels:
            raise UserError(f"the files have more than the {limits.max_media_pixels:,} pixels that this service takes")
        return frames

    return counted


class MediaReader:
    """Decodes files in separate processes, up to `num_processes` at once; they are started when needed."""

    def __init__(self, limits: MediaLimits, *, num_processes: int = 1, is_checking: bool = False) -> None:
        """`is_checking`: files are only checked, at low priority; the result is their number of pixels, not frames."""
        self.limits = limits = MediaLimits(**{name: getattr(limits, name) for name in settings_of(MediaLimits)})
        self._free: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for _ in range(num_processes):
            self._free.put(_Worker(limits, is_checking))

    def read(self, data: bytes) -> np.ndarray:
        """Decode a file as `untrusted.decode` does; a file that crashes or hangs the decoder is refused too.

        Raises:
            UserError: as `untrusted.decode`.
            TimeoutError: if no process becomes free.
        """
        shape, raw = self._asked(data)
        return np.frombuffer(raw, dtype=np.uint8).reshape(shape)

    def num_pixels(self, data: bytes) -> int:
        """Pixels of all frames of a file; raises as `read`."""
        return math.prod(self._asked(data)[0][:3])

    def _asked(self, data: bytes) -> tuple[list[int], bytearray]:
        check_bytes(data, self.limits)
        try:
            worker = self._free.get(timeout=_SECONDS_FOR_A_TURN)
        except queue.Empty:
            raise TimeoutError("too many files are being read at the moment") from None
        try:
            return worker.read(data)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """Ends the processes when they are free."""
        while not self._free.empty():
            self._free.get_nowait().end()


class _Worker:
    """One process; it is started again after a file has crashed it."""

    def __init__(self, limits: MediaLimits, is_checking: bool) -> None:
        self._limits, self._is_checking = limits, is_checking
        self._process: subprocess.Popen | None = None

    def read(self, data: bytes) -> tuple[list[int], bytearray]:
        """The shape of the frames, and their bytes (empty with `is_checking`)."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            answer, raw = self._exchange(data)
        except (OSError, EOFError, ValueError, struct.error):
            self.end()
            raise UserError("the file cannot be read: its decoder crashed or took too long") from None
        if "error" in answer:
            raise UserError(answer["error"])
        return answer["shape"], raw

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> None:
        self.end()
        self._process = subprocess.Popen(
            python_module("megadit.infer.media.untrusted", json.dumps(asdict(self._limits)), *self._arguments()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # each thread would reserve memory
        )

    def _arguments(self) -> list[str]:
        return [CHECKING] if self._is_checking else []

    def _exchange(self, data: bytes) -> tuple[dict, bytearray]:
        process, too_late = self._process, threading.Timer(_SECONDS, self._process.kill)
        too_late.start()
        try:
            send(process.stdin, data)
            answer = json.loads(receive(process.stdout, 1 << 16))
            return answer, receive(process.stdout, 3 * self._limits.max_media_pixels)
        finally:
            too_late.cancel()


def send(file: IO[bytes], data: bytes) -> None:
    file.write(struct.pack("<Q", len(data)))
    file.write(data)
    file.flush()


def receive(file: IO[bytes], most: int) -> bytearray:
    """Receives a message; raises EOFError if it is shorter than announced, or longer than `most` bytes."""
    head = file.read(8)
    if len(head) < 8 or (length := struct.unpack("<Q", head)[0]) > most:
        raise EOFError
    data = bytearray(length)
    if file.readinto(data) < length:
        raise EOFError
    return data
