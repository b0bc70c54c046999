import numpy as np
import pytest

from megadit.infer.media.video_io import write_video

SIZE = (5, 16, 24)
"""Frames, height, width that the tiny bundle makes."""


def write_folder(folder, count, seed=0, size=SIZE, captions=True):
    """Videos of a bright square that moves over a dim texture."""
    folder.mkdir(parents=True)
    frames, height, width = size
    random = np.random.default_rng(seed)
    for number in range(count):
        video = np.repeat(random.integers(0, 60, (1, height, width, 3)), frames, 0).astype(np.uint8)
        top, left, colour = random.integers(1, 8), random.integers(1, 8), random.integers(100, 255, 3)
        for frame in range(frames):
            video[frame, top : top + 6, left + frame : left + frame + 6] = colour
        write_video(folder / f"{number:03d}.mp4", video, 8.0)
        if captions:
            (folder / f"{number:03d}.txt").write_text(f"a square of the colour {number % 40}")
    return folder


@pytest.fixture(scope="session")
def real_folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("real") / "real", 40)
