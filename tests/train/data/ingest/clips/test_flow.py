"""`--min_flow`: optical flow of videos whose speed is known."""

import json

import numpy as np
import pytest

from megadit.train.data.ingest.clips.decode import read_timeline
from megadit.train.data.ingest.clips.flow import mean_speed
from megadit.train.data.ingest.plan import Settings, Source
from megadit.train.data.prepare import command as prepare

SETTINGS = Settings(sizes=((64, 64),), num_frames=(17,))


@pytest.fixture
def speed_of(tmp_path, make_clip):
    """speed_of(frames): of an mp4 of them."""

    def speed_of(frames: np.ndarray) -> float:
        path = make_clip(tmp_path / "clip.mp4", frames.astype(np.uint8))
        timeline = read_timeline(Source(name="clip", kind="video", path=str(path)), SETTINGS)
        return mean_speed(timeline.luma_THW, timeline.fps)

    return speed_of


@pytest.mark.parametrize("step", [(0, 1), (0, 4), (3, 0), (6, 8), (0, 16)])
def test_the_speed_of_a_camera_that_pans_is_found(speed_of, make_pan, step):
    """The share of its 96 x 128 pixels that it passes, 24 times a second; from a quarter of a thumbnail's pixel on.

    What enters at the edges is misjudged, and the squares of pixels that move alike are a fifth of a thumbnail wide.
    """
    expected = 24 * np.hypot(step[0] / 96, step[1] / 128)
    assert speed_of(make_pan("china.jpg", 17, 96, 128, step=step, start=(100, 60))) == pytest.approx(expected, rel=0.15)


def test_what_fades_flickers_or_is_full_of_noise_stands_still(speed_of, make_pan):
    still_1HWC = make_pan("china.jpg", 1, 96, 128, start=(100, 60)).astype(float)
    times = np.arange(17)[:, None, None, None]
    noise = np.random.default_rng(0).normal(0, 10, (17, 96, 128, 3))
    for frames in (still_1HWC * (1 - times / 20), still_1HWC * (0.6 + 0.3 * (times % 2)), (still_1HWC + noise)):
        assert np.abs(np.diff(frames, axis=0)).mean() > 4  # it is not static
        assert speed_of(frames.clip(0, 255)) < 0.06


def test_slow_clips_are_left_out_with_their_speed(tmp_path, make_clip, make_pan, capsys):
    (tmp_path / "videos").mkdir()
    pan = make_pan("china.jpg", 17, 96, 128, start=(100, 60))
    fade = pan[:1] * np.linspace(1, 0.5, 17)[:, None, None, None]
    for name, frames in {"pan": pan, "fade": fade.astype(np.uint8)}.items():
        make_clip(tmp_path / "videos" / f"{name}.mp4", frames)
    command = ["videos", str(tmp_path / "videos"), str(tmp_path / "out"), "--sizes", "64x64", "--num_frames", "17"]
    assert prepare.main([*command, "--tokenizer", "pixels", "--num_workers", "0", "--min_flow", "0.1"]) == 0
    (skip,) = map(json.loads, (tmp_path / "out/prepare/skips.jsonl").read_text().splitlines())
    assert (skip["source"], skip["reason"]) == ("fade.mp4", "slow") and skip["detail"].startswith("frames 0 to 17, 0.0")
    assert "left out: 1 x slow (--min_flow)" in capsys.readouterr().out
