"""Deinterlacing by ffmpeg's bwdif."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import av

from megadit.infer.decoding.frame import Frame
from megadit.infer.decoding.rules import UnusableSourceError


def deinterlaced(frames: Iterable[Frame]) -> Iterator[Frame]:
    """The frames; those that are marked as interlaced are deinterlaced, with their neighbours."""
    filter, before = None, None
    for frame in frames:
        if filter is not None and not filter.is_interlaced(frame):
            yield from filter.rest()
            filter, before = None, None
        if filter is None:
            if not frame.pixels.interlaced_frame:
                before = frame
                yield frame
                continue
            filter = _Bwdif(frame, before if before is not None and _shape(before) == _shape(frame) else None)
        yield from filter.put(frame)
    if filter is not None:
        yield from filter.rest()


def _shape(frame: Frame) -> tuple[int, int, str]:
    return frame.pixels.width, frame.pixels.height, frame.pixels.format.name


class _Bwdif:
    """Filter with one output frame for each input frame, delayed by one."""

    def __init__(self, first: Frame, before: Frame | None) -> None:
        self._shape = _shape(first)
        width, height, format = self._shape
        self._graph, self._waiting = av.filter.Graph(), deque()
        try:
            source = self._graph.add_buffer(width=width, height=height, format=format, time_base=first.pixels.time_base)
            bwdif = self._graph.add("bwdif", "mode=send_frame:deint=interlaced")
            self._graph.link_nodes(source, bwdif, self._graph.add("buffersink")).configure()
        except (av.FFmpegError, ValueError) as error:
            raise UnusableSourceError("interlaced", f"{format}: {error}") from None
        self._count = 0
        if before is not None:
            self._push(before)
            self._waiting[-1] = None

    def is_interlaced(self, frame: Frame) -> bool:
        return _shape(frame) == self._shape

    def put(self, frame: Frame) -> list[Frame]:
        self._push(frame)
        return self._pull()

    def rest(self) -> list[Frame]:
        self._graph.push(None)
        return self._pull()

    def _push(self, frame: Frame) -> None:
        pts = frame.pixels.pts
        frame.pixels.pts = self._count  # bwdif needs increasing times
        self._graph.push(frame.pixels)
        frame.pixels.pts = pts
        self._count += 1
        self._waiting.append(frame)

    def _pull(self) -> list[Frame]:
        found = []
        while True:
            try:
                pixels = self._graph.pull()
            except (av.BlockingIOError, av.EOFError):
                return found
            frame = self._waiting.popleft()
            if frame is not None:
                found.append(replace(frame, pixels=pixels, is_deinterlaced=frame.pixels.interlaced_frame))
