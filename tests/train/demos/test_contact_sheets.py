"""The demo's picture: frames arrive unchanged."""

import imageio.v3 as iio
import numpy as np
import torch

from megadit.train.demos import contact_sheets


def test_a_strip_shows_the_frames_in_order():
    video = torch.full((3, 4, 8, 8), -1.0)
    for frame in range(4):
        video[0, frame] = -1 + frame / 2
    strip = contact_sheets._strip(video, gap=2)
    assert strip.shape == (8, 4 * 10 - 2, 3)
    assert strip[0, [0, 10, 20, 30], 0].tolist() == [0, 64, 128, 191]
    assert strip[0, 8].tolist() == [16, 18, 22]  # the background, between frames


def test_contact_sheet_is_a_picture_with_every_clip(tmp_path):
    colours = torch.tensor([[1.0, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    rows = [
        contact_sheets.SheetRow(
            caption=f"clip {n}",
            video_CTHW=colour[:, None, None, None].expand(3, 9, 32, 32),
            is_right={"digit": True, "colour": n == 0, "direction": False},
            note="unseen",
        )
        for n, colour in enumerate(colours)
    ]
    contact_sheets.contact_sheet(tmp_path / "sheet.png", rows, title="three clips")
    pixels = iio.imread(tmp_path / "sheet.png")[..., :3].reshape(-1, 3).astype(int)
    for colour in ([255, 0, 0], [0, 255, 0], [0, 0, 255]):
        assert (np.abs(pixels - colour).max(1) < 8).mean() > 0.05
    assert [path.name for path in tmp_path.iterdir()] == ["sheet.png"]
