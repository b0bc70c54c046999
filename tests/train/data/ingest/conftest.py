"""A folder of videos as people have them: three codecs, odd sizes, variable rates, rotated, cut short, and worse."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path

import av
import numpy as np
import pytest

from megadit.train.data.ingest import report

CODECS = (("libx264", "mp4"), ("libvpx-vp9", "webm"), ("mpeg4", "avi"))


DRAW = report.draw


@pytest.fixture(scope="module", autouse=True)
def no_histograms() -> Iterator[None]:
    """Those of a report take half a second, and say in pictures what its numbers say."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw", lambda path, *_: path.touch())
        yield


@pytest.fixture
def histograms(monkeypatch) -> None:
    """They are drawn all the same."""
    monkeypatch.setattr(report, "draw", DRAW)


@cache
def photograph(name: str) -> np.ndarray:
    from sklearn.datasets import load_sample_image

    return load_sample_image(name)


def pan(
    name: str,
    num_frames: int,
    height: int,
    width: int,
    *,
    step: tuple[int, int] = (2, 3),
    start: tuple[int, int] = (0, 0),
    flip: int = 0,
) -> np.ndarray:
    """A window that moves over a photograph: uint8 THWC."""
    picture = photograph(name)
    picture = (picture, picture[:, ::-1], picture[::-1], np.ascontiguousarray(picture[::-1, ::-1]))[flip]
    rows, columns = picture.shape[0] - height, picture.shape[1] - width
    places = (((start[0] + t * step[0]) % rows, (start[1] + t * step[1]) % columns) for t in range(num_frames))
    return np.stack([picture[y : y + height, x : x + width] for y, x in places])


def write_clip(
    path: Path,
    frames: np.ndarray,
    *,
    codec: str = "libx264",
    fps: int = 24,
    times: Sequence[int] | None = None,
    rotation: int = 0,
    pix_fmt: str = "yuv420p",
    aspect: Fraction | None = None,
) -> Path:
    """`times` in milliseconds, for a variable rate; `aspect` of a pixel, its width by its height."""
    with av.open(path, "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pix_fmt
        stream.thread_count = 1
        if codec == "libvpx-vp9":
            stream.options = {"deadline": "realtime", "cpu-used": "8"}
        if times is not None:
            stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        if rotation:
            stream.set_display_rotation(rotation)
        for number, picture in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(
                np.ascontiguousarray(picture), format={3: "rgb24", 4: "rgba"}[picture.shape[-1]]
            )
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


GENERATORS = ("testsrc", "testsrc2", "mandelbrot")
"""Of ffmpeg: pictures that change by a rule."""


def generate(source: str, num_frames: int, height: int, width: int) -> np.ndarray:
    """What a generator of ffmpeg shows: uint8 THWC."""
    graph = av.filter.Graph()
    graph.link_nodes(
        graph.add(source, f"size={width}x{height}:rate=24"), graph.add("format", "rgb24"), graph.add("buffersink")
    ).configure()
    return np.stack([graph.vpull().to_ndarray(format="rgb24") for _ in range(num_frames)])


def write_folder(root: Path, num_good: int = 15) -> None:
    """`num_good` captioned videos of photographs, one of each generator, and nine that are of no use."""
    root.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(num_good):
        codec, suffix = CODECS[number % 3]
        height, width = ((96, 128), (131, 99), (100, 100), (97, 143))[number % 4]
        height, width = height // 2 * 2, width // 2 * 2
        name = ("china.jpg", "flower.jpg")[number % 2]
        place = (100 + 37 * number % 60, 61 * number % 390)
        frames = pan(
            name,
            20 + number % 7,
            height,
            width,
            step=(1 + number % 5, 2 + number % 3),
            start=place,
            flip=number // 2 % 4,
        )
        frames = frames.astype(np.int16) * (6 + number % 5) // 10 + number
        extra = {"times": np.cumsum(generator.integers(20, 80, len(frames))).tolist()} if number == 1 else {}
        extra = extra | ({"rotation": 90} if number == 3 else {})
        path = write_clip(root / f"good-{number:02d}.{suffix}", frames.astype(np.uint8), codec=codec, **extra)
        path.with_suffix(".txt").write_text(f"a window over {name[:-4]} number {number}")
    for number, source in enumerate(GENERATORS):
        codec, suffix = CODECS[number % 3]
        path = write_clip(root / f"good-{source}.{suffix}", generate(source, 20, 96, 128), codec=codec)
        path.with_suffix(".txt").write_text(f"what {source} draws")
    _write_useless(root)


def _write_useless(root: Path) -> None:
    (root / "words.mp4").write_text("this is not a video\n" * 100)
    (root / "empty.mp4").write_bytes(b"")
    (root / "playlist.mp4").write_text("#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n")
    whole = write_clip(root / "whole.mp4", pan("china.jpg", 20, 96, 128, flip=1, step=(7, 9)))
    (root / "cut.mp4").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])  # its index, at the end, is lost
    whole.unlink()
    write_clip(root / "small.mp4", pan("flower.jpg", 20, 32, 32))
    write_clip(root / "static.mp4", np.repeat(pan("flower.jpg", 1, 96, 128, flip=3), 20, axis=0))
    write_clip(root / "black.mp4", np.zeros((20, 96, 128, 3), np.uint8))
    write_clip(root / "short.mp4", pan("flower.jpg", 5, 96, 128))
    original = next(iter(sorted(root.glob("good-00.*"))))
    (root / f"zz-copy{original.suffix}").write_bytes(original.read_bytes())


@pytest.fixture(scope="session")
def videos(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("media") / "videos"
    write_folder(root)
    return root


@pytest.fixture(scope="session")
def make_clip() -> Callable[..., Path]:
    return write_clip


@pytest.fixture(scope="session")
def make_pan() -> Callable[..., np.ndarray]:
    return pan
