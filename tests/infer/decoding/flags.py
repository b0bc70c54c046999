"""Rows of the table: what flags of frames say of colours, lines, damage and transparency."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np

from .clips import untagged_hd, video, write
from .drawing import COUNT, FIELDS, FPS, Row, frames, picture, see_through

# --- flags of frames ----------------------------------------------------------------------------------------------


def _tagged(transfer: int, primaries: int) -> Callable[[av.VideoFrame], av.VideoFrame]:
    def convert(frame: av.VideoFrame) -> av.VideoFrame:
        shown = frame.reformat(format="yuv444p10le", dst_colorspace="BT2020", dst_color_range=1)
        shown.colorspace, shown.color_range, shown.color_trc, shown.color_primaries = 9, 1, transfer, primaries
        return shown

    return convert


BT2020 = np.array([[0.6274, 0.3293, 0.0433], [0.0691, 0.9195, 0.0114], [0.0164, 0.0880, 0.8956]])
P3 = np.array([[0.8225, 0.1774, 0.0], [0.0332, 0.9669, 0.0], [0.0171, 0.0724, 0.9108]])
"""From sRGB's primaries."""


def coded(matrix: np.ndarray, transfer: int) -> list[np.ndarray]:
    """FIELDS as a file of such primaries and such a transfer holds them (0..255), white at 203 nits."""
    light = (np.array(FIELDS) / 255) ** 2.4 @ matrix.T
    if transfer == 18:  # HLG
        scene = (0.203 * light) ** (1 / 1.2)
        signal = np.where(
            scene <= 1 / 12,
            np.sqrt(3 * scene),
            0.17883277 * np.log(np.maximum(12 * scene - 0.28466892, 1e-9)) + 0.55991073,
        )
    elif transfer == 16:  # PQ
        power = (0.0203 * light) ** 0.1593017578125
        signal = ((0.8359375 + 18.8515625 * power) / (1 + 18.6875 * power)) ** 78.84375
    else:
        signal = light ** (1 / 2.4)
    return list(255 * signal)


def in_16_bits(fields: Any) -> list[np.ndarray]:
    shown = frames(kind=np.float64, fields=fields)
    return [(257 * each).round().astype(np.uint16) for each in shown]


def _flagged(name: str, transfer: int, primaries: int, fields: Any, **values: Any) -> Row:
    tags = {"colorspace": 9, "color_range": 1, "color_trc": transfer, "color_primaries": primaries}
    options = {"x265-params": "log-level=none:qp=4"}
    shown, convert = in_16_bits(fields), _tagged(transfer, primaries)
    return video(name, "libx265", "yuv444p10le", pictures=shown, tags=tags, convert=convert, options=options, **values)


def moment(number: int) -> np.ndarray:
    """What moves to the right; a frame is woven of two."""
    return np.roll(picture(255), 4 * number, axis=1)


def _interlaced(path: Path, *, top_first: bool) -> None:
    """Lines of two moments: what moves has the edges of a comb."""
    moments = [moment(number) for number in range(2 * COUNT)]
    woven = []
    for number in range(COUNT):
        frame = moments[2 * number].copy()
        first, second = (0, 1) if top_first else (1, 0)
        frame[first::2], frame[second::2] = moments[2 * number][first::2], moments[2 * number + 1][second::2]
        woven.append(frame)

    def convert(frame: av.VideoFrame) -> av.VideoFrame:
        graph = av.filter.Graph()
        source = graph.add_buffer(width=frame.width, height=frame.height, format="rgb24", time_base=Fraction(1, FPS))
        nodes = source, graph.add("setfield", "tff" if top_first else "bff"), graph.add("buffersink")
        graph.link_nodes(*nodes).configure()
        frame.pts = 0
        graph.push(frame)
        shown = graph.pull()
        shown.pts = None
        return shown.reformat(format="yuv422p")

    flags = {"flags": "+ilme+ildct", "qscale": "2"}
    write(path, woven, "mpeg2video", "yuv422p", options=flags, convert=convert)


def _damaged(path: Path) -> None:
    """An mp4 of three groups of pictures, in the second of which bytes are wrong."""
    noise = np.random.default_rng(0)
    pictures = [np.clip(shown + noise.integers(-9, 9, shown.shape), 0, 255).astype(np.uint8) for shown in frames(36)]
    write(path, pictures, options={"g": "12", "bf": "0", "sc_threshold": "0"})
    content = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        places = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    for place, size in places[14:18]:
        for at in range(place + size // 3, place + size - 8, 7):
            content[at] ^= 0x5A
    path.write_bytes(content)


def _cut_short(path: Path) -> None:
    write(path, frames(36), options={"g": "12", "bf": "0"}, flags="faststart")
    with av.open(str(path)) as container:
        places = [packet.pos for packet in container.demux(video=0) if packet.size]
    path.write_bytes(path.read_bytes()[: sorted(places)[24]])


HIDDEN = (FIELDS[0], (0, 0, 0), FIELDS[2], FIELDS[3])
ALPHA = [
    video(name, codec, pix_fmt, pictures=see_through(), fields=HIDDEN, near=10)
    for name, codec, pix_fmt in (
        ("alpha_vp9.webm", "libvpx-vp9", "yuva420p"),
        ("alpha_qtrle.mov", "qtrle", "argb"), ("alpha_png.mov", "png", "rgba"),
        ("alpha_prores.mov", "prores_ks", "yuva444p10le"), ("alpha_ffv1.mkv", "ffv1", "yuva444p"),
        ("alpha_bgra.avi", "rawvideo", "bgra"),
    )
]  # fmt: skip
FLAGS = [
    video("alpha_vp8.webm", "libvpx", "yuva420p", pictures=see_through(), fields=HIDDEN, near=10,
           options={"auto-alt-ref": "0"}),
    Row(name="untagged_hd.mkv", make=untagged_hd, numbers=(0, 1), size=(720, 960), near=5),
    _flagged("hlg.mp4", 18, 9, coded(BT2020, 18)), _flagged("hlg.mov", 18, 9, coded(BT2020, 18)),
    _flagged("pq.mp4", 16, 9, coded(BT2020, 16)), _flagged("pq.mkv", 16, 9, coded(BT2020, 16)),
    _flagged("bt2020.mp4", 14, 9, coded(BT2020, 14)), _flagged("p3.mp4", 1, 12, coded(P3, 1)),
    *(video(f"matrix_{number}.mkv", "libx265", "yuv444p", tags={"colorspace": number}, refused="unknown colours",
            options={"x265-params": "log-level=none"}) for number in (8, 14)),
    Row(name="top_first.mpg", make=partial(_interlaced, top_first=True), numbers=None),
    Row(name="bottom_first.mpg", make=partial(_interlaced, top_first=False), numbers=None),
    Row(name="damaged.mp4", make=_damaged, numbers=(*range(14), *range(24, 36)), refused="damaged",
        clips_only=True, near=14),
    Row(name="cut_short.mp4", make=_cut_short, numbers=range(24)),
]  # fmt: skip
