import contextlib
import io
import json
import os
import subprocess
import sys

import av
import imageio.v3 as iio
import numpy as np
import pytest
from PIL import Image

from megadit.infer.media.animations import encode_animation
from megadit.infer.media.video_io import (
    encode_mp4,
    open_container,
    read_comment,
    read_video,
    stream_mp4,
    write_video,
)
from megadit.models.shared.errors import UserError


def moving_square(frames: int = 9, height: int = 64, width: int = 48) -> np.ndarray:
    video = np.full((frames, height, width, 3), 32, np.uint8)
    for t in range(frames):
        video[t, 16:32, 4 + 2 * t : 20 + 2 * t] = (224, 64, 96)
    return video


@pytest.mark.parametrize("fps", [8, 12.5, 24, 30000 / 1001])
def test_mp4_gives_back_frames_size_and_fps(tmp_path, fps):
    video = moving_square()
    write_video(tmp_path / "clip.mp4", video, fps)
    frames, read_fps = read_video(tmp_path / "clip.mp4")
    assert frames.shape == video.shape and frames.dtype == np.uint8
    assert read_fps == pytest.approx(fps, rel=1e-3)
    # H.264 is lossy and halves the colours' resolution: the mean stays close, and frame order must be right.
    error = np.abs(frames.astype(float) - video).mean(axis=(1, 2, 3))
    shuffled = np.abs(frames[::-1].astype(float) - video).mean(axis=(1, 2, 3))
    assert error.max() < 6 < shuffled.max()


WRITERS = {
    "write_video": lambda path, video: write_video(path, video, 8, metadata={"comment": "a red square"}),
    "stream_mp4": lambda path, video: stream_mp4(path, [video], 8, metadata={"comment": "a red square"}),
    "encode_mp4": lambda path, video: path.write_bytes(encode_mp4(video, 8, metadata={"comment": "a red square"})),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize(("height", "width"), [(64, 48), (33, 47), (720, 16)])
def test_mp4_is_h264_of_the_high_profile_in_yuv420p_with_metadata(tmp_path, write, height, width):
    """Which every browser plays; 4:4:4 or ten bits few do."""
    write(tmp_path / "clip.mp4", moving_square(frames=2, height=height, width=width))
    with av.open(str(tmp_path / "clip.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.profile, stream.pix_fmt) == ("h264", "High", "yuv420p")
        assert container.metadata["comment"] == "a red square"


KR_KB = {1: (0.2126, 0.0722), 6: (0.299, 0.114)}
"""Shares of red and blue in luma, by the number of the matrix in ITU-T H.273: BT.709, BT.601."""


@pytest.mark.parametrize(("height", "matrix"), [(64, 6), (480, 6), (719, 1), (720, 1), (1080, 1)])
@pytest.mark.parametrize("color", [(200, 30, 30), (30, 180, 40), (20, 40, 210)])
def test_an_mp4_tells_which_colours_its_numbers_are(height, matrix, color):
    video = np.full((1, height, 16, 3), color, np.uint8)
    with av.open(io.BytesIO(encode_mp4(video, 8))) as container:
        (stream,) = container.streams.video
        tags = stream.codec_context
        assert (tags.colorspace, tags.color_range) == (matrix, 1) and tags.color_primaries == tags.color_trc == 1
        frame = next(container.decode(stream))
        y, cb, cr = (float(np.frombuffer(plane, np.uint8)[0]) for plane in frame.planes)
    kr, kb = KR_KB[matrix]
    luma, blue, red = (y - 16) / 219, (cb - 128) / 224, (cr - 128) / 224
    shown_red, shown_blue = luma + 2 * (1 - kr) * red, luma + 2 * (1 - kb) * blue
    shown_green = (luma - kr * shown_red - kb * shown_blue) / (1 - kr - kb)
    assert np.abs(255 * np.array([shown_red, shown_green, shown_blue]) - color).max() <= 4
    assert np.abs(frame.to_ndarray(format="rgb24")[0, 0].astype(float) - color).max() <= 4, "as we read it too"


def test_odd_sizes_are_padded_by_their_edge(tmp_path):
    video = moving_square(height=33, width=47)
    write_video(tmp_path / "clip.mp4", video, 8)
    frames, _ = read_video(tmp_path / "clip.mp4")
    assert frames.shape == (9, 34, 48, 3)
    assert np.abs(frames[:, 33].astype(float) - video[:, 32, [*range(47), 46]]).mean() < 6


def test_png_of_one_frame_is_lossless_and_jpg_is_close(tmp_path):
    image = moving_square(frames=1)
    write_video(tmp_path / "image.png", image)
    write_video(tmp_path / "image.jpg", image)
    frames, fps = read_video(tmp_path / "image.png")
    assert fps == 0 and np.array_equal(frames, image)
    assert np.abs(iio.imread(tmp_path / "image.jpg").astype(float) - image[0]).mean() < 6


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    write_video(tmp_path / "clip.mp4", moving_square(), 8)
    before = (tmp_path / "clip.mp4").read_bytes()
    with pytest.raises(UserError, match="fps=0"):
        write_video(tmp_path / "clip.mp4", moving_square(), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]
    assert (tmp_path / "clip.mp4").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "frames", "message"),
    [
        ("clip.avi", moving_square(), "ends in"),
        ("clip", moving_square(), "ends in"),
        ("image.png", moving_square(), "one frame, got 9"),
        ("clip.mp4", moving_square().astype(np.float32), "uint8"),
        ("clip.mp4", moving_square()[..., :1], "uint8"),
        ("clip.mp4", moving_square()[:0], "uint8"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, name, frames, message):
    with pytest.raises(UserError, match=message):
        write_video(tmp_path / name, frames, 8)
    assert not list(tmp_path.iterdir())


def test_unreadable_files_are_user_errors(tmp_path):
    (tmp_path / "broken.mp4").write_bytes(b"not a video")
    (tmp_path / "broken.png").write_bytes(b"not an image")
    for name in ("broken.mp4", "broken.png", "missing.mp4", "missing.gif"):
        for read in (read_video, read_comment):
            with pytest.raises(UserError, match=name):
                read(tmp_path / name)


@pytest.mark.parametrize("suffix", ["tga", "ico", "pcx", "sgi", "dds"])
def test_formats_that_are_not_read_are_called_that(tmp_path, suffix):
    Image.new("RGB", (32, 32), "red").save(tmp_path / f"a.{suffix}")
    with pytest.raises(UserError, match="in a format that is not read here"):
        read_video(tmp_path / f"a.{suffix}")


def test_devices_and_pipes_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.mp4")
    for path in ("/dev/zero", tmp_path / "pipe.mp4", tmp_path):
        with pytest.raises(UserError, match="cannot read .*: it is no file"):
            read_video(path)


@pytest.mark.parametrize(("suffix", "tolerance"), [(".gif", 6), (".webp", 6)])
def test_animations_give_back_frames_and_fps(tmp_path, suffix, tolerance):
    video = moving_square()
    video[4] = video[3]  # writers join frames that are alike
    write_video(tmp_path / f"clip{suffix}", video, 12.5)
    frames, fps = read_video(tmp_path / f"clip{suffix}")
    assert frames.shape == video.shape and fps == pytest.approx(12.5)
    error = np.abs(frames.astype(float) - video).mean(axis=(1, 2, 3))
    assert error.max() < tolerance < np.abs(frames[::-1].astype(float) - video).mean(axis=(1, 2, 3)).max()


@pytest.mark.parametrize("suffix", [".mp4", ".gif", ".webp", ".png", ".jpg"])
def test_every_format_keeps_a_comment(tmp_path, suffix):
    frames = moving_square(frames=1 if suffix in (".png", ".jpg") else 4)
    comment = json.dumps({"prompt": '日本 "quoted"\n', "sigmas": [3.0, 0.1], "long": "x" * 2000})
    write_video(tmp_path / f"clip{suffix}", frames, 8, metadata={"comment": comment})
    assert json.loads(read_comment(tmp_path / f"clip{suffix}"))["prompt"] == '日本 "quoted"\n'
    write_video(tmp_path / f"plain{suffix}", frames, 8)
    assert read_comment(tmp_path / f"plain{suffix}") == ""


def test_encoding_is_reproducible():
    for suffix in (".gif", ".webp"):
        assert encode_animation(moving_square(), 8, suffix) == encode_animation(moving_square(), 8, suffix)
    assert encode_mp4(moving_square(), 8) == encode_mp4(moving_square(), 8)


def test_same_frames_give_the_same_file_whatever_memory_held_before():
    program = """
import hashlib, numpy as np
from megadit.infer.media.video_io import encode_mp4
squares = np.kron(np.random.default_rng(0).integers(0, 255, (6, 6, 3)), np.ones((8, 8, 1))).astype(np.uint8)
print(hashlib.sha256(encode_mp4(np.stack([squares[i : i + 32, i : i + 32] for i in range(9)]), 8)).hexdigest())
"""
    digests = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"MALLOC_PERTURB_": fill},  # what glibc fills fresh memory with
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for fill in ("0", "77")
    ]
    assert digests[0] == digests[1]


# -------------------------------------------------------------------------------------- what anybody may have made


def picture(height: int, width: int) -> bytes:
    """A raw H.264 stream, whose container tells nothing: the decoder alone knows the size."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="h264") as container:
        stream = container.add_stream("libx264", rate=25, options={"preset": "ultrafast"})
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        frame = av.VideoFrame(width, height, "yuv420p")
        for plane in frame.planes:
            plane.update(bytes([128]) * plane.buffer_size)
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


OPENED = """
import sys
from pathlib import Path
from megadit.infer.media.video_io import open_container
def most() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
before = most()
with open_container(sys.argv[1], max_pixels=float(sys.argv[2])) as container:
    stream = container.streams.video[0]
    print(stream.height, stream.width, most() - before)
"""


def test_what_a_video_holds_is_found_out_without_its_pixels(tmp_path):
    """And the control: with room for them they are made before anybody can ask for their size."""
    path, taken = tmp_path / "large.h264", []
    path.write_bytes(picture(4096, 8192))
    for max_pixels in (10**6, 10**8):
        command = [sys.executable, "-c", OPENED, str(path), str(max_pixels)]
        height, width, kib = map(
            int, subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()
        )
        assert (height, width) == (4096, 8192), "whoever opens it can refuse it by its size"
        taken.append(kib / 1024)
    assert taken[0] < 32 < 48 < taken[1], f"{taken} MiB; a picture takes 48"


@pytest.mark.parametrize("is_limited", [True, False])
def test_a_size_that_grows_within_a_video_is_refused_when_it_does(tmp_path, is_limited):
    path, sizes = tmp_path / "grows.h264", []
    path.write_bytes(picture(64, 96) * 3000 + picture(1024, 2048))
    with open_container(str(path), max_pixels=10**5 if is_limited else 10**7) as container:
        stream = container.streams.video[0]
        assert (stream.height, stream.width) == (64, 96), "as far as it is read to find that out"
        with pytest.raises(av.InvalidDataError) if is_limited else contextlib.nullcontext():
            sizes += {(frame.height, frame.width) for frame in container.decode(stream)}
    assert is_limited or sorted(sizes) == [(64, 96), (1024, 2048)]


def test_a_playlist_by_the_name_of_a_video_leads_nowhere(tmp_path):
    write_video(tmp_path / "secret.mp4", moving_square(), 8)
    (tmp_path / "list.mp4").write_text("#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nsecret.mp4\n#EXT-X-ENDLIST\n")
    (tmp_path / "join.mp4").write_text("ffconcat version 1.0\nfile secret.mp4\n")
    with av.open(str(tmp_path / "join.mp4"), options={"format_whitelist": "concat,mov"}) as container:
        assert container.streams.video, "ffmpeg would follow it"
    for name in ("list.mp4", "join.mp4"):
        with pytest.raises(UserError, match="cannot read"):
            read_video(tmp_path / name)
