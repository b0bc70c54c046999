"""Crops that containers state for the frames of a track: `clap` in MP4 and MOV, PixelCrop in Matroska.

PyAV reads neither; the ffmpeg program crops.
"""

import io
import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import BinaryIO

import av

from megadit.infer.decoding.frame import Frame

_TO_ENTRY = (b"mdia", b"minf", b"stbl", b"stsd")
_ENTRY_BYTES, _SIZE_AT = 78, 24
"""Bytes of a video track's description before its boxes, and before its width and height."""
_SEGMENT, _TRACKS, _TRACK, _VIDEO, _CLUSTER = 0x18538067, 0x1654AE6B, 0xAE, 0xE0, 0x1F43B675
_SIDES = (0x54CC, 0x54BB, 0x54DD, 0x54AA)
_MOST = 4096
"""Most boxes or elements that are looked at in one."""
Crop = tuple[int, int, int, int]
"""Columns and rows to drop at the left, top, right and bottom."""
NO_CROP = 0, 0, 0, 0
_Range = tuple[int, int]


def crops_of(file: BinaryIO) -> list[Crop]:
    """The crop of each track of a file, which is rewound; [] for other containers, and damaged ones."""
    end = file.seek(0, io.SEEK_END)
    file.seek(0)
    head = file.read(8)
    try:
        if head[:4] == b"\x1a\x45\xdf\xa3":
            return list(_of_matroska(file, end))
        return list(_of_mp4(file, end)) if head[4:] in (b"ftyp", b"moov", b"wide", b"mdat", b"free", b"skip") else []
    except (struct.error, ZeroDivisionError, IndexError):
        return []
    finally:
        file.seek(0)


def _boxes(file: BinaryIO, start: int, end: int) -> Iterator[tuple[bytes, _Range]]:
    for _ in range(_MOST):
        if start + 8 > end:
            return
        file.seek(start)
        size, kind = struct.unpack(">I4s", file.read(8))
        begin = start + 8
        if size == 1:
            size, begin = struct.unpack(">Q", file.read(8))[0], start + 16
        stop = min(start + size, end) if size else end
        if stop < begin:
            return
        yield kind, (begin, stop)
        start = stop


def _inside(file: BinaryIO, of: _Range, kind: bytes) -> list[_Range]:
    return [place for found, place in _boxes(file, *of) if found == kind]


def _of_mp4(file: BinaryIO, end: int) -> Iterator[Crop]:
    movie = next((place for kind, place in _boxes(file, 0, end) if kind == b"moov"), (end, end))
    for track in _inside(file, movie, b"trak"):
        places = [track]
        for kind in _TO_ENTRY:
            places = [inner for place in places[:1] for inner in _inside(file, place, kind)]
        entries = [entry for begin, stop in places[:1] for _, entry in _boxes(file, begin + 8, stop)]
        apertures = [
            inner for begin, stop in entries[:1] for inner in _inside(file, (begin + _ENTRY_BYTES, stop), b"clap")
        ]
        yield _aperture(file, entries[0][0], apertures[0][0]) if apertures else NO_CROP


def _aperture(file: BinaryIO, entry: int, at: int) -> Crop:
    file.seek(entry + _SIZE_AT)
    sizes = struct.unpack(">HH", file.read(4))
    file.seek(at)
    values = struct.unpack(">IIIIiIiI", file.read(32))
    shown, off = ([Fraction(*values[place : place + 2]) for place in places] for places in ((0, 2), (4, 6)))
    first = [math.floor(move + (size - side) / 2) for size, side, move in zip(sizes, shown, off, strict=True)]
    last = [size - math.ceil(side) - low for size, side, low in zip(sizes, shown, first, strict=True)]
    return _possible((*first, *last), *sizes)


def _possible(crop: Crop, width: int, height: int) -> Crop:
    is_possible = min(crop) >= 0 and crop[0] + crop[2] < width and crop[1] + crop[3] < height
    return crop if is_possible else NO_CROP


def _elements(file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, _Range]]:
    """Elements of EBML, those of unknown size to the end."""
    for _ in range(_MOST):
        if start >= end:
            return
        file.seek(start)
        head = file.read(12)
        length = 9 - head[0].bit_length()
        bits = 9 - head[length].bit_length()
        if length > 4 or bits > 8:
            return
        size = int.from_bytes(head[length : length + bits], "big") & (1 << 7 * bits) - 1
        begin = start + length + bits
        start = end if size == (1 << 7 * bits) - 1 else min(begin + size, end)
        yield int.from_bytes(head[:length], "big"), (begin, start)


def _of_matroska(file: BinaryIO, end: int) -> Iterator[Crop]:
    for segment in (place for kind, place in _elements(file, 0, end) if kind == _SEGMENT):
        for kind, tracks in _elements(file, *segment):
            if kind == _CLUSTER:
                return
            if kind == _TRACKS:
                for track in (place for kind, place in _elements(file, *tracks) if kind == _TRACK):
                    yield _sides(file, track)
                return


def _sides(file: BinaryIO, track: _Range) -> Crop:
    found = {0xB0: 0, 0xBA: 0}  # width and height
    for video in (place for kind, place in _elements(file, *track) if kind == _VIDEO):
        for kind, (begin, stop) in _elements(file, *video):
            if kind in (*_SIDES, *found):
                file.seek(begin)
                found[kind] = int.from_bytes(file.read(min(stop - begin, 8)), "big")
    return _possible(tuple(found.get(side, 0) for side in _SIDES), found[0xB0], found[0xBA])


class Cropper:
    """Crops frames of one size by ffmpeg's filter; others stay as they are."""

    def __init__(self, crop: Crop, width: int, height: int) -> None:
        self._crop, self._size = crop, (width, height)
        self._graph: av.filter.Graph | None = None
        self._format = ""

    def __call__(self, frame: Frame) -> Frame:
        pixels = frame.pixels
        if self._crop == NO_CROP or (pixels.width, pixels.height) != self._size:
            return frame
        if self._graph is None or pixels.format.name != self._format:
            self._format, self._graph = pixels.format.name, self._made(pixels)
        self._graph.push(pixels)
        left, top, right, bottom = self._crop
        width, height = self._size
        alpha_HW = None if frame.alpha_HW is None else frame.alpha_HW[top : height - bottom, left : width - right]
        return replace(frame, pixels=self._graph.pull(), alpha_HW=alpha_HW)

    def _made(self, frame: av.VideoFrame) -> av.filter.Graph:
        left, top, right, bottom = self._crop
        width, height = self._size
        graph = av.filter.Graph()
        source = graph.add_buffer(width=width, height=height, format=frame.format.name, time_base=frame.time_base)
        box = f"{width - left - right}:{height - top - bottom}:{left}:{top}:exact=1"
        graph.link_nodes(source, graph.add("crop", box), graph.add("buffersink")).configure()
        return graph
