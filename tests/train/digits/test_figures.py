"""The demo's pictures: frames arrive unchanged, metrics survive a kill and a resume."""

import imageio.v3 as iio
import numpy as np
import pytest
import torch

from megadit.models.shared.errors import UserError
from megadit.train.digits import figures


def test_a_strip_shows_the_frames_in_order():
    video = torch.full((3, 4, 8, 8), -1.0)
    for frame in range(4):
        video[0, frame] = -1 + frame / 2
    strip = figures._strip(video, gap=2)
    assert strip.shape == (8, 4 * 10 - 2, 3)
    assert strip[0, [0, 10, 20, 30], 0].tolist() == [0, 64, 128, 191]
    assert strip[0, 8].tolist() == [16, 18, 22]  # the background, between frames


def test_contact_sheet_is_a_picture_with_every_clip(tmp_path):
    colours = torch.tensor([[1.0, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    rows = [
        figures.SheetRow(
            caption=f"clip {n}",
            video_CTHW=colour[:, None, None, None].expand(3, 9, 32, 32),
            is_right={"digit": True, "colour": n == 0, "direction": False},
            note="unseen",
        )
        for n, colour in enumerate(colours)
    ]
    figures.contact_sheet(tmp_path / "sheet.png", rows, title="three clips")
    pixels = iio.imread(tmp_path / "sheet.png")[..., :3].reshape(-1, 3).astype(int)
    for colour in ([255, 0, 0], [0, 255, 0], [0, 0, 255]):
        assert (np.abs(pixels - colour).max(1) < 8).mean() > 0.05
    assert [path.name for path in tmp_path.iterdir()] == ["sheet.png"]


def test_metrics_after_a_kill_and_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1, "loss": 3.0}', '{"step": 2, "loss": 9.0}', '{"step": 2, "loss": 2.0}', '{"step": 3, "lo']
    path.write_text("\n".join(lines))
    records = figures.read_metrics(path)
    steps, values = figures.series(records, "loss")
    assert steps.tolist() == [1, 2] and values.tolist() == [3.0, 2.0]
    with pytest.raises(UserError, match=r"other\.jsonl does not exist"):
        figures.read_metrics(tmp_path / "other.jsonl")


def test_smoothing_is_a_mean_over_the_past():
    assert figures.smooth(np.array([4.0, 2.0, 6.0, 0.0]), 2).tolist() == [4.0, 3.0, 4.0, 3.0]


def test_curves_of_whatever_was_recorded(tmp_path):
    records = [{"step": step, "loss": 1 / step, "lr": 1e-3, "grad_norm": 1.0} for step in range(1, 200)]
    for step in (100, 199):
        records[step - 1]["validation"] = {"none": {"mean": 50 / step, "1": 0.4}, "0.05": {"mean": 40 / step}}
    assert figures.series(records, "validation", "0.05", "mean")[1].tolist() == [0.4, 40 / 199]
    figures.training_curves(tmp_path / "some.png", records, title="a run")
    figures.training_curves(tmp_path / "few.png", records[:1], title="one step")
    wide, narrow = iio.imread(tmp_path / "some.png"), iio.imread(tmp_path / "few.png")
    assert wide.shape[1] > narrow.shape[1] and wide.std() > 1
