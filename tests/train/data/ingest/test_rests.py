"""Frames past the last whole clip: said in frames, with what would use them; `new` proposes a rate that leaves few."""

import json

import pytest

from megadit.train.data.ingest.clips.probe import Seen
from megadit.train.data.prepare import command as prepare
from megadit.train.new.proposal import CPU, choose_length

OPTIONS = ("--sizes", "64x64", "--num_frames", "17", "--num_workers", "0", "--tokenizer", "pixels", "--val_share", "0")


def test_what_a_report_proposes_uses_the_rest(tmp_path, make_clip, make_pan, capsys):
    (tmp_path / "clips").mkdir()
    for number, name in enumerate(("china.jpg", "flower.jpg")):
        make_clip(tmp_path / "clips" / f"{number}.mp4", make_pan(name, 24, 64, 64, step=(9, 14)))
    proposal = "14 of 48 frames lie past the last whole clip; --num_frames 17,5 or --overlap would use them"
    for more, clips in (((), 2), (("--overlap",), 4), (("--num_frames", "17,5"), 4)):
        out = tmp_path / f"out{len(more)}"
        assert prepare.main(["videos", str(tmp_path / "clips"), str(out), *OPTIONS, *more]) == 0
        report, said = json.loads((out / "report.json").read_text()), capsys.readouterr().out
        assert sum(report["samples"].values()) == clips, more
        assert (f"left out: 2 x rest of a scene: {proposal}" in said) == (not more), more


@pytest.mark.parametrize(
    ("frames", "own", "length", "fps"),
    [(24, 12.0, 13, 6.5), (24, 24.0, 17, 17.0), (40, 24.0, 13, 8.0), (96, 24.0, 17, 8.0), (300, 30.0, 17, 8.0)],
)
def test_a_rate_at_which_a_clip_is_as_long_as_a_video(frames, own, length, fps):
    seen = [Seen(height=64, width=64, fps=own, frames=min(frames, 240))] * 5
    chosen, rate = choose_length(seen, CPU)
    assert (chosen, rate) == (length, pytest.approx(fps, abs=0.3))
    if frames / own < 4:
        assert int(frames * rate / own + 1e-6) == length
