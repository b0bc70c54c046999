"""Curves of a run: metrics survive a kill and a resume, and are drawn while it goes on."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import imageio.v3 as iio
import numpy as np
import pytest

from megadit.models.shared.errors import UserError
from megadit.train.monitoring import curves
from megadit.train.monitoring import trackers as trackers
from megadit.train.monitoring.trackers import open_trackers
from megadit.train.recipes import load_recipe


def test_metrics_after_a_kill_and_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1, "loss": 3.0}', '{"step": 2, "loss": 9.0}', '{"step": 2, "loss": 2.0}', '{"step": 3, "lo']
    path.write_text("\n".join(lines))
    metrics = curves.MetricsFile(path)
    steps, values = curves.series(metrics.read(), "loss")
    assert steps.tolist() == [1, 2] and values.tolist() == [3.0, 2.0]
    with pytest.raises(UserError, match=r"other\.jsonl does not exist"):
        curves.MetricsFile(tmp_path / "other.jsonl").read()


def test_what_was_read_is_not_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0, "other": 1}\n{"step": 2, "lo')
    metrics = curves.MetricsFile(path)
    assert metrics.read() == [{"step": 1, "loss": 3.0}]
    told = path.read_text()
    path.write_text(told.replace("3.0", "9.9") + 'ss": 2.0}\n')  # a reader of all would see 9.9
    assert metrics.read() == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]


@pytest.mark.parametrize("line", ["[" * 100_000, "3", "{}", "{", None])
def test_a_stranger_s_line_is_one_line(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n" if line else "")
    if line is None:
        os.truncate(tmp_path / "metrics.jsonl", 1 << 40)
    with pytest.raises(UserError, match="has a line that is no record of a step|is longer than") as raised:
        curves.MetricsFile(tmp_path / "metrics.jsonl").read()
    assert "\n" not in str(raised.value)


def test_smoothing_is_a_mean_over_the_past():
    assert curves.smooth(np.array([4.0, 2.0, 6.0, 0.0]), 2).tolist() == [4.0, 3.0, 4.0, 3.0]


def test_curves_of_whatever_was_recorded(tmp_path):
    records = [{"step": step, "loss": 1 / step, "lr": 1e-3, "grad_norm": 1.0} for step in range(1, 200)]
    for step in (100, 199):
        records[step - 1]["validation"] = {"none": {"mean": 50 / step, "1": 0.4}, "0.05": {"mean": 40 / step}}
    assert curves.series(records, "validation", "0.05", "mean")[1].tolist() == [0.4, 40 / 199]
    curves.training_curves(tmp_path / "some.png", records, title="a run")
    curves.training_curves(tmp_path / "few.png", records[:1], title="one step")
    wide, narrow = iio.imread(tmp_path / "some.png"), iio.imread(tmp_path / "few.png")
    assert wide.shape[1] > narrow.shape[1] and wide.std() > 1


def test_a_run_draws_its_curves_beside_its_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "SECONDS_BETWEEN_CURVES", 1e9)
    lines = [json.dumps({"step": step, "loss": 1 / step, "lr": 1e-3}) for step in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = load_recipe("digits_tiny")
    logger = replace(run.logger, tensorboard=False, curves=True)
    (guarded,) = open_trackers(replace(run, train=replace(run.train, output_dir=str(tmp_path)), logger=logger), start=0)
    board = guarded._board
    board.scalars(1, {"loss": 1.0})
    assert board._process is None, "neither time nor validation asks for one"
    board.scalars(2, {"loss": 1.0, "validation/none/mean": 2.0})
    drawing = board._process
    assert drawing is not None
    board.scalars(3, {"loss": 1.0, "validation/none/mean": 2.0})
    assert board._process is drawing, "the one that has read the steps before"
    board.close()
    assert drawing.returncode == 0
    assert iio.imread(tmp_path / "curves.png").std() > 1
    (tmp_path / "metrics.jsonl").unlink()
    board.close()
    assert "curves.png could not be drawn; `python -m megadit.train.monitoring.curves" in capsys.readouterr().err


def test_requests_that_waited_are_drawn_once(tmp_path, monkeypatch):
    path, drawn = tmp_path / "metrics.jsonl", []

    def draw(_, records, *, title):
        drawn.append(len(records))
        if len(drawn) == 1:  # while the first is drawn, two steps end
            with path.open("a") as file:
                file.write('{"step": 2, "loss": 2.0}\n{"step": 3, "loss": 2.0}\n')

    path.write_text('{"step": 1, "loss": 3.0}\n')
    monkeypatch.setattr(curves, "training_curves", draw)
    monkeypatch.setattr(sys, "stdin", io.StringIO(2 * curves.AGAIN + curves.END))
    assert curves.main([str(tmp_path), curves.FOLLOW]) == 0
    assert drawn == [1, 3]


def test_drawing_needs_no_torch():
    names = "[name for name in ('torch', 'megatron') if name in sys.modules]"
    program = f"import sys, megadit.train.monitoring.curves; print({names})"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"
