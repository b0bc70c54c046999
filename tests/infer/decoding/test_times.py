"""Whatever times and rates a file states, its frames end."""

import io
from fractions import Fraction

import av
import numpy as np
import pytest

from megadit.infer.decoding.rules import Rules, UnusableSourceError
from megadit.infer.decoding.sampling import USUAL_FPS, read_all
from megadit.infer.decoding.video import Video


def clip(times, rate=25):
    """A Matroska of 16x16 frames at these times, in seconds, whose header has a rate."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width = stream.height = 16
        stream.pix_fmt, stream.time_base = "yuv420p", Fraction(1, 1000)
        for number, seconds in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 40 * number, np.uint8), format="rgb24")
            frame.pts, frame.time_base = round(1000 * seconds), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return io.BytesIO(file.getvalue())


@pytest.mark.parametrize("last", [1e5, 1e6, 2e6])
def test_a_time_far_ahead_is_refused_before_the_frames_until_then_are_filled_in(last):
    with pytest.raises(UnusableSourceError, match="its times reach .* s; at most 86,400 s"):
        read_all(clip([0, 0.04, last]), Rules())


def test_a_video_without_a_rate_has_the_usual_one(monkeypatch):
    monkeypatch.setattr(Video, "fps", float("inf"))
    frames, fps = read_all(clip([0, 0.04, 0.08, 0.2]), Rules())
    assert fps == USUAL_FPS and len(frames) == 6, "the gap is filled"


def test_times_are_checked_as_they_come():
    """A header may say less than the frames do."""
    seen = []
    read_all(clip([0, 0.04, 0.6]), Rules(), lambda num_frames, height, width, seconds: seen.append(seconds))
    assert max(seen) >= 0.6
