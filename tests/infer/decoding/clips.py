"""Rows of the table: containers, codecs, pixel formats, matrices of colour and of display, and times of videos."""

import io
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import ExifTags, Image

from .drawing import COUNT, FPS, HEIGHT, MATRICES, WIDTH, Row, frames, stored_as

# --- videos -------------------------------------------------------------------------------------------------------


def write(
    path: Any,
    pictures: Sequence[np.ndarray] | None = None,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    *,
    format: str | None = None,
    rate: int = FPS,
    times: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
    flags: str = "",
    matrix: Sequence[int] | None = None,
    aspect: Fraction | None = None,
    tags: dict[str, int] | None = None,
    title: str = "",
    convert: Callable[[av.VideoFrame], av.VideoFrame] = lambda frame: frame,
) -> None:
    """`times` in milliseconds; `matrix` of display, `tags` of colour."""
    pictures = frames() if pictures is None else pictures
    file, movflags = path if hasattr(path, "write") else str(path), {"movflags": flags} if flags else {}
    with same_priority(), av.open(file, "w", format=format, options=movflags) as container:
        container.metadata.update({"title": title} if title else {})
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt, stream.thread_count = pix_fmt, 1
        if times is not None:
            stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        if matrix is not None:
            stream.set_display_matrix(matrix)
        for name, value in (tags or {}).items():
            setattr(stream.codec_context, name, value)
        for number, shown in enumerate(pictures):
            kind = "rgb48le" if shown.dtype == np.uint16 else {3: "rgb24", 4: "rgba"}[shown.shape[2]]
            frame = convert(av.VideoFrame.from_ndarray(np.ascontiguousarray(shown), format=kind))
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


@contextmanager
def same_priority() -> Iterator[None]:
    """Restore the scheduling policy: as root SVT-AV1 leaves its caller in real time, above all other processes."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def _of_photos(path: Path) -> None:
    """JPEGs of a camera that was held upright, each with its EXIF, as `ffmpeg -c copy` makes a video of them."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mjpeg", rate=FPS)
        stream.height, stream.width, stream.pix_fmt = WIDTH, HEIGHT, "yuvj444p"
        for number, shown in enumerate(frames()):
            photo = io.BytesIO()
            Image.fromarray(np.rot90(shown)).save(photo, "jpeg", exif=exif, subsampling=0)
            packet = av.Packet(photo.getvalue())
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, number, number, Fraction(1, FPS)
            container.mux(packet)


def display_matrix(name: str) -> tuple[int, ...]:
    a, b, c, d = (value << 16 for value in MATRICES[name])
    return a, b, 0, c, d, 0, 0, 0, 1 << 30


CROP = 16, 8, 32, 24
"""Columns and rows that the container crops at the left, top, right and bottom."""


def cropped(path: Path, *, matrix: str = "upright") -> None:
    """By a clean aperture in the description of the track, which other containers take over."""
    left, top, right, bottom = CROP
    shown = [stored_as(matrix, each) for each in frames()]
    height, width = shown[0].shape[:2]
    padded = [np.pad(each, ((top, bottom), (left, right), (0, 0)), constant_values=255) for each in shown]
    whole = path.with_suffix(".whole.mp4")
    write(whole, padded, matrix=display_matrix(matrix))
    content = bytearray(whole.read_bytes())
    offsets = ((left - right) // 2, 1, (top - bottom) // 2, 1)
    clap = struct.pack(">I4s4I4i", 40, b"clap", width, 1, height, 1, *offsets)
    places, place, end = [], 0, len(content)
    for kind, ahead in (
        (b"moov", 8),
        (b"trak", 8),
        (b"mdia", 8),
        (b"minf", 8),
        (b"stbl", 8),
        (b"stsd", 16),
        (b"avc1", 8),
    ):
        while bytes(content[place + 4 : place + 8]) != kind:
            place += int.from_bytes(content[place : place + 4], "big")
        places.append(place)
        end = place + int.from_bytes(content[place : place + 4], "big")
        place += ahead
    for place in places:
        content[place : place + 4] = (int.from_bytes(content[place : place + 4], "big") + len(clap)).to_bytes(4, "big")
    content[end:end] = clap
    whole.write_bytes(content)
    with av.open(str(whole)) as source, av.open(str(path), "w") as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                container.mux(packet)
    whole.unlink()


def video(name: str, codec: str = "libx264", pix_fmt: str = "yuv420p", **values: Any) -> Row:
    of_row = {key: values.pop(key) for key in list(values) if key in Row.__dataclass_fields__}
    return Row(name=name, make=partial(write, codec=codec, pix_fmt=pix_fmt, **values), needs=(codec,), **of_row)


CONTAINERS = [
    video("h264.mp4"), video("h264.mov"), video("h264.mkv"), video("h264.ts"), video("h264.flv"),
    video("h264.m2ts", format="mpegts"), video("h264.mts", format="mpegts"), video("h264.m4v", format="mp4"),
    video("h264_b.mp4", options={"bf": "3"}), video("h264_b.ts", options={"bf": "3"}),
    video("h264_b.avi", options={"bf": "3"}), video("h264_b.mkv", options={"bf": "3"}),
    video("h264.h264", format="h264"), video("h264_b.h264", format="h264", options={"bf": "3"}),
    *(video(f"h264_{rate}.h264", format="h264", rate=rate, fps=rate) for rate in (5, 12, 48)),
    video("fragmented.mp4", format="mp4", flags="frag_keyframe+empty_moov"),
    video("hevc.mp4", "libx265"), video("hevc.mov", "libx265"), video("hevc.hevc", "libx265", format="hevc"),
    video("av1.mp4", "libsvtav1"), video("av1.webm", "libsvtav1"),
    video("vp8.webm", "libvpx"), video("vp9.webm", "libvpx-vp9"), video("vp9.mp4", "libvpx-vp9"),
    video("vp8.ivf", "libvpx"),
    video("mpeg4.avi", "mpeg4"), video("mpeg4_b.avi", "mpeg4", options={"bf": "2"}), video("mpeg4.mp4", "mpeg4"),
    video("msmpeg4.avi", "msmpeg4v2"), video("wmv2.wmv", "wmv2", format="asf"), video("flv1.flv", "flv"),
    video("mpeg2.mpg", "mpeg2video"), video("mpeg2.vob", "mpeg2video", format="vob"),
    video("mpeg2.mxf", "mpeg2video", near=12), video("mpeg2.m2v", "mpeg2video", format="mpeg2video"),
    video("mpeg1.m1v", "mpeg1video", format="mpeg1video"),
    video("raw.y4m", "wrapped_avframe", format="yuv4mpegpipe"), video("raw.avi", "rawvideo"),
    video("mjpeg.avi", "mjpeg", "yuvj420p"), video("mjpeg.mov", "mjpeg", "yuvj420p"),
    video("mjpeg.mjpeg", "mjpeg", "yuvj420p", format="mjpeg", rate=25, fps=25),
    video("prores.mov", "prores_ks", "yuv422p10le"), video("qtrle.mov", "qtrle", "rgb24"),
    video("png.mov", "png", "rgb24"), video("ffv1.mkv", "ffv1"), video("ffv1.nut", "ffv1"),
    video("huffyuv.avi", "huffyuv", "yuv422p"), video("utvideo.avi", "utvideo", "yuv420p"),
    Row(name="photos.avi", make=_of_photos), Row(name="photos.mov", make=_of_photos),
    video("v210.mov", "v210", "yuv422p10le"), video("magicyuv.avi", "magicyuv", "gbrp"),
]  # fmt: skip
PIXELS = [
    video(f"{pix_fmt}.mkv", "ffv1", pix_fmt, near=4 if "444" in pix_fmt or "rgb" in pix_fmt else 8)
    for pix_fmt in ("yuv422p", "yuv444p", "yuv420p10le", "yuv444p10le", "yuv444p16le", "bgr0", "rgb48le", "yuv411p",
                    "gbrp10le", "yuv410p")
] + [
    video("gray.mkv", "ffv1", "gray", fields=[(87,) * 3, (122,) * 3, (58,) * 3, (128,) * 3]),
    video("palette.mov", "rawvideo", "gray", fields=[(87,) * 3, (122,) * 3, (58,) * 3, (128,) * 3]),
    video("gbrp.mp4", "libx264rgb", "rgb24"), video("yuv444p.mp4", pix_fmt="yuv444p"),
    video("yuv420p10le.mp4", pix_fmt="yuv420p10le"),
    video("odd.mkv", "ffv1", "yuv444p", pictures=frames(height=65, width=97), size=(65, 97)),
    *(
        video(f"cropped_{left}.mp4", options={"x264-params": f"crop-rect={left},8,16,0"},
              pictures=[np.pad(shown, ((8, 0), (left, 16), (0, 0))) for shown in frames()])
        for left in (2, 10, 32)
    ),
    *(Row(name=f"clap.{suffix}", make=cropped) for suffix in ("mp4", "mov", "mkv")),
    Row(name="clap_rot90.mov", make=partial(cropped, matrix="rot90")),
]  # fmt: skip


def _in_space(space: int, color_range: int) -> Callable[[av.VideoFrame], av.VideoFrame]:
    """To YUV of a matrix, as H.273 numbers them."""
    named = {1: "ITU709", 5: "ITU601", 9: "BT2020"}[space]

    def convert(frame: av.VideoFrame) -> av.VideoFrame:
        shown = frame.reformat(format="yuv444p", dst_colorspace=named, dst_color_range=color_range)
        shown.colorspace, shown.color_range = space, color_range
        return shown

    return convert


SPACES = [
    video(f"matrix{space}_range{color_range}.{suffix}", "libx264", "yuv444p", near=5,
           convert=_in_space(space, color_range), tags={"colorspace": space, "color_range": color_range})
    for space in (1, 5, 9) for color_range in (1, 2) for suffix in ("mp4", "mkv")
]  # fmt: skip


def untagged_hd(path: Path) -> None:
    convert = _in_space(1, 1)

    def untagged(frame: av.VideoFrame) -> av.VideoFrame:
        shown = convert(frame)
        shown.colorspace, shown.color_range = 2, 0
        return shown

    write(path, frames(2, height=720, width=960), "ffv1", "yuv444p", convert=untagged)


# --- display matrices ---------------------------------------------------------------------------------------------


def _turned(name: str, suffix: str) -> Row:
    stored = [stored_as(name, shown) for shown in frames()]
    return video(f"{name}.{suffix}", pictures=stored, matrix=display_matrix(name))


TURNED = [_turned(name, suffix) for name in MATRICES for suffix in ("mp4", "mov")]


def _of_codec(path: Path, *, said: bytes, instead: bytes) -> None:
    write(path)
    path.write_bytes(path.read_bytes().replace(said, instead))


def _titled(path: Path) -> None:
    """A title in another encoding than UTF-8, which is what most containers promise and programs on Windows ignore."""
    write(path, title="Cafe")
    content = path.read_bytes()
    assert b"Cafe" in content
    path.write_bytes(content.replace(b"Cafe", b"Caf\xe9"))


TITLED = [Row(name=f"titled.{suffix}", make=_titled) for suffix in ("avi", "mp4", "mkv", "flv")]
UNDECODABLE = [
    Row(name=name, make=partial(_of_codec, said=said, instead=instead), refused="broken")
    for name, said, instead in (
        ("encrypted.mp4", b"avc1", b"encv"), ("another_codec.mkv", b"V_MPEG4/ISO/AVC", b"V_ANOTHER_CODEC"),
    )
]  # fmt: skip
ASPECTS = [
    video("wide.mp4", pictures=frames(width=48), aspect=Fraction(2)),
    video("narrow.mkv", pictures=frames(width=192), aspect=Fraction(1, 2)),
    video("wide_rot90.mp4", pictures=[stored_as("rot90", shown)[:, ::2] for shown in frames()], aspect=Fraction(2),
           matrix=(0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)),
]  # fmt: skip


# --- times --------------------------------------------------------------------------------------------------------


def _joined(path: Path, *, shift: int = 0) -> None:
    """Two transport streams, the second of which begins at its own time."""
    whole = b""
    for part in range(2):
        buffer = io.BytesIO()
        pictures = frames(2 * COUNT)[part * COUNT : (part + 1) * COUNT]
        offset = shift * part
        write(buffer, pictures, format="mpegts", times=[offset + 1000 * number // FPS for number in range(COUNT)])
        whole += buffer.getvalue()
    path.write_bytes(whole)


def _two_streams(path: Path) -> None:
    """A small preview first, then the video that is marked as the one to show."""
    with av.open(str(path), "w") as container:
        streams = [container.add_stream("libx264", rate=FPS) for _ in range(2)]
        for stream, (height, width) in zip(streams, ((32, 32), (HEIGHT, WIDTH)), strict=True):
            stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        streams[0].disposition, streams[1].disposition = av.stream.Disposition(0), av.stream.Disposition.default
        for shown in frames():
            for stream, pixels in zip(streams, (np.zeros((32, 32, 3), np.uint8), shown), strict=True):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        for stream in streams:
            container.mux(stream.encode())


def _covered(path: Path) -> None:
    """A cover first, which nothing marks as attached, and then the video."""
    cover = io.BytesIO()
    Image.new("RGB", (48, 48), "white").save(cover, "jpeg")
    with av.open(str(path), "w") as container:
        first, stream = container.add_stream("mjpeg", rate=1), container.add_stream("libx264", rate=FPS)
        first.height, first.width, first.pix_fmt = 48, 48, "yuvj420p"
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        packet = av.Packet(cover.getvalue())
        packet.stream, packet.pts, packet.dts, packet.time_base = first, 0, 0, Fraction(1)
        container.mux(packet)
        for shown in frames():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24")))
        container.mux(stream.encode())


STILL_MS = [*(1000 * number // 4 for number in range(6)), 16_250, 16_500]
TIMES = [
    video("offset.mkv", times=[5000 + 1000 * number // FPS for number in range(COUNT)]),
    video("twice_as_slow.mkv", times=[83 * number for number in range(COUNT)], rate=12, fps=12.05),
    video("still.mkv", pictures=frames(8), times=STILL_MS, rate=4, fps=4, numbers=(*range(6), *[5] * 59, 6, 7)),
    video("rounded.mov", times=[round(1000 * number / FPS) for number in range(COUNT)]),
    Row(name="joined.ts", make=_joined, numbers=range(2 * COUNT)),
    Row(name="joined_later.ts", make=partial(_joined, shift=3_600_000), numbers=range(2 * COUNT)),
    Row(name="default_second.mkv", make=_two_streams),
    *(Row(name=f"covered.{suffix}", make=_covered) for suffix in ("mp4", "mkv", "avi")),
]  # fmt: skip
