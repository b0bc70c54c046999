"""Small files do not take a decoder hours, nor fill the memory, through whatever door they come."""

import io
import os
import struct
import zlib

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from megadit.infer.decoding import animations, rules, sampling
from megadit.infer.decoding.pictures import read_picture
from megadit.infer.decoding.rules import Rules, UnusableSourceError
from megadit.infer.decoding.sampling import read_all
from megadit.infer.evaluate.videos import _opens
from megadit.train.data.ingest.clips.scan import scan
from megadit.train.data.ingest.plan import Settings, Source
from tests.infer.decoding import test_times as times


def gif(count: int, side: int) -> bytes:
    """Frames of one dot each on a square canvas, in 23 bytes."""
    head = b"GIF89a" + struct.pack("<HHBBB", side, side, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    dot = b"\x21\xf9\x04\0\x02\0\0\0,\0\0\0\0\x01\0\x01\0\0\x02\x02\x44\x01\0"
    return head + b"\x21\xff\x0bNETSCAPE2.0\x03\x01\0\0\0" + count * dot + b";"


def webp(count: int, side: int) -> bytes:
    dot = io.BytesIO()
    Image.new("RGB", (1, 1)).save(dot, "webp", lossless=True)
    frame = bytes(12) + b"\x14\0\0\0" + dot.getvalue()[12:]
    frame = b"ANMF" + struct.pack("<I", len(frame)) + frame
    canvas = struct.pack("<I", side - 1)[:3] * 2
    body = b"WEBPVP8X\x0a\0\0\0\x02\0\0\0" + canvas + b"ANIM\x06\0\0\0" + bytes(6) + count * frame
    return b"RIFF" + struct.pack("<I", len(body)) + body


def apng(count: int, side: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def frame(number: int, width: int) -> bytes:
        return chunk(b"fcTL", struct.pack(">IIIIIHHBB", number, width, width, 0, 0, 1, 50, 0, 0))

    found = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    found += chunk(b"acTL", struct.pack(">II", count, 0)) + frame(0, side)
    found += chunk(b"IDAT", zlib.compress(bytes((side + 1) * side)))
    for number in range(1, 2 * count - 2, 2):
        found += frame(number, 1) + chunk(b"fdAT", struct.pack(">I", number + 1) + zlib.compress(b"\0\0"))
    return found + chunk(b"IEND", b"")


def clip(count: int, side: int, rate: int = 25) -> bytes:
    """A still screen, of which x264 writes a few bytes a frame."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("libx264", rate=rate, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = side, side, "yuv420p"
        for _ in range(count):
            frame = av.VideoFrame.from_ndarray(np.full((side, side, 3), 90, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


MAKERS = {"gif": gif, "webp": webp, "png": apng, "mkv": clip}


@settings(max_examples=12)
@given(st.sampled_from([*MAKERS]), st.integers(8, 40), st.sampled_from([96, 200, 256]))
def test_frames_of_few_bytes_are_decoded_up_to_a_limit(tmp_path_factory, kind, count, side):
    content = MAKERS[kind](count, side)
    path = tmp_path_factory.mktemp("bomb") / f"a.{kind}"
    path.write_bytes(content)
    source = Source(name=path.name, kind="video", path=str(path))
    options = Settings(sizes=((16, 16),), num_frames=(1,), min_motion=-1.0, min_brightness=-1.0)
    assert len(read_all(io.BytesIO(content), Rules())[0]) == count and not scan(source, options).skips
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "PIXELS_PER_BYTE", 0)
        patch.setattr(rules, "FREE_PIXELS", count * side * side - 1)
        with pytest.raises(UnusableSourceError, match="decompression bomb: its frames unfold"):
            read_all(io.BytesIO(content), Rules())
        assert [skip.reason for skip in scan(source, options).skips] == ["decompression bomb"]
        patch.setattr(rules, "FREE_PIXELS", count * side * side)
        assert len(read_all(io.BytesIO(content), Rules())[0]) == count


def test_the_limit_lies_between_a_still_screen_and_a_bomb():
    screen, side = clip(50, 1024), 1024
    assert 49 * side**2 / (len(screen) - len(clip(1, side))) < rules.PIXELS_PER_BYTE
    assert 10_000**2 / (len(gif(2, 10_000)) - len(gif(1, 10_000))) > 10 * rules.PIXELS_PER_BYTE


@settings(max_examples=12)
@given(st.sampled_from([*MAKERS]), st.integers(5, 20), st.integers(0, 4))
def test_frames_that_fill_the_memory_are_refused_while_they_are_read(kind, count, fit):
    """A size for each: frames that are repeated until a later time count as well."""
    content, side = MAKERS[kind](count, 96), 96
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "host_memory", lambda: 6 * side * side * fit)
        with pytest.raises(UnusableSourceError, match=f"too large: its {fit} first frames of 96x96 fill the memory"):
            read_all(io.BytesIO(content), Rules())
        patch.setattr(sampling, "host_memory", lambda: 6 * side * side * count)
        assert len(read_all(io.BytesIO(content), Rules())[0]) == count


def test_a_frame_that_is_held_for_a_day_at_a_high_rate_fills_no_memory(monkeypatch):
    monkeypatch.setattr(sampling, "host_memory", lambda: 1 << 20)
    with pytest.raises(UnusableSourceError, match="682 first frames of 16x16 fill the memory"):
        read_all(times.clip((0, 0.001, 0.002, 80_000), rate=900), Rules())


HEADS = {
    "avif": b"\0\0\0\x18ftypavif\0\0\0\0avifmif1",
    "jpg": b"\xff\xd8\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0",
    "webp": b"RIFF\xff\xff\xff\x7fWEBPVP8X\x0a\0\0\0\0\0\0\0\x07\0\0\x07\0\0",
    "moving.webp": b"RIFF\xff\xff\xff\x7fWEBPVP8X\x0a\0\0\0\x02\0\0\0\x07\0\0\x07\0\0",
    "gif": b"GIF89a\x10\0\x10\0\0\0\0\x21\xff\x0bNETSCAPE2.0",
}


@pytest.mark.parametrize("name", HEADS)
def test_a_file_of_holes_is_not_read_to_its_end(tmp_path, name):
    """An archive holds it in a few bytes; a decoder would take gigabytes of memory, or search it byte by byte."""
    path = tmp_path / f"a.{name}"
    path.write_bytes(HEADS[name])
    os.truncate(path, animations.MAX_BYTES + 1)
    for read in (read_all, read_picture) if name != "gif" else (read_all,):
        with path.open("rb") as file, pytest.raises(UnusableSourceError, match="large file: more than 256 MiB"):
            read(file, Rules())
    assert name in ("gif", "moving.webp") or not _opens(path)
