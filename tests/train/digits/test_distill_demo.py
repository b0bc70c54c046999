"""The demo of distillation: its options, and its stages from students to the picture."""

import shutil
from pathlib import Path

import pytest

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json
from megadit.train.digits import distill_demo


def test_every_option_reaches_the_demo(tmp_path, monkeypatch):
    asked = []

    def stop(demo, stages):
        asked.append(demo)
        raise UserError("seen")

    monkeypatch.setattr(distill_demo, "run_stages", stop)
    options = ["--out", "elsewhere", "--bundle", str(tmp_path), "--ranks", "1", "--steps", "7", "--stride", "3"]
    assert distill_demo.main([*options, "--seed", "5"]) == 2
    expected = distill_demo.DistillDemo(out=Path("elsewhere"), base=tmp_path, num_ranks=1, steps=7, stride=3, seed=5)
    assert asked == [expected]


def test_students_start_and_learn_where_they_should(monkeypatch):
    asked = []
    monkeypatch.setattr(distill_demo, "run_module", lambda *arguments: asked.append(arguments))
    demo = distill_demo.DistillDemo(out=Path("out"), base=Path("base/bundle"), steps=7)
    for stage in distill_demo.STAGES[:3]:
        stage.run(demo)
    assert [arguments[1] for arguments in asked] == ["base/bundle"] * 3
    assert all("checkpoint.init_from=out/calls4/bundle" in arguments for arguments in asked[1:])
    assert "out/calls2/pairs/dataset" in asked[2] and "train.train_iters=7" in asked[0]


@pytest.mark.slow
def test_students_are_judged_and_drawn(quick_demo, tmp_path, capsys):
    """With copies of a base, hardly trained, for students: all of it but their training."""
    for calls in (4, 2, 1):
        shutil.copytree(quick_demo / "bundle", tmp_path / "out" / f"calls{calls}" / "bundle")
    options = ["--bundle", str(quick_demo / "bundle"), "--out", str(tmp_path / "out"), "--stride", "48"]
    assert distill_demo.main(options) == 0
    found = read_json(tmp_path / "out" / "score.json")
    assert len({(each["distance"], each["spread"], each["evaluations"]) for each in found.values()}) == 1
    assert capsys.readouterr().out.count("1.00    1.00") == 4, "a copy is as its teacher"
    assert (tmp_path / "out" / "distilled.png").stat().st_size > 10_000
