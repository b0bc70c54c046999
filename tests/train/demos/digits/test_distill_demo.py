"""The demo of distillation: its options, and its stages from students to the picture."""

import shutil
from pathlib import Path

import pytest

from megadit.models.shared.files import read_json
from megadit.train.demos.digits import distill_demo
from megadit.train.recipes import load_recipe
from tests.bundles import write_able_bundle


def test_every_option_reaches_the_demo(tmp_path, monkeypatch, demo_of):
    monkeypatch.setattr(distill_demo.DistillDemo, "has_first_frame", False)
    options = ["--out", "elsewhere", "--bundle", str(tmp_path), "--ranks", "1", "--steps", "7", "--stride", "3"]
    expected = distill_demo.DistillDemo(out=Path("elsewhere"), base=tmp_path, num_ranks=1, steps=7, stride=3, seed=5)
    assert demo_of(distill_demo.main, *options, "--seed", "5") == expected


def demo_from(monkeypatch, *, has_first_frame):
    """A demo of a bundle that is not there, and what its students are asked for: [arguments of `run_module`]."""
    asked = []
    monkeypatch.setattr(distill_demo, "run_module", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(distill_demo.DistillDemo, "has_first_frame", has_first_frame)
    demo = distill_demo.DistillDemo(out=Path("out"), base=Path("base/bundle"), steps=7)
    monkeypatch.setattr(distill_demo.DistillDemo, "classifier_file", Path("judge"))
    for calls in demo.calls:
        distill_demo.STUDENTS[calls].run(demo)
    return asked


def test_students_start_and_learn_where_they_should(monkeypatch):
    asked = demo_from(monkeypatch, has_first_frame=False)
    assert [arguments[1] for arguments in asked] == ["base/bundle"] * 3
    assert all("checkpoint.init_from=out/calls4/bundle" in arguments for arguments in asked[1:])
    assert "out/calls2/pairs/dataset" in asked[2] and "train.train_iters=7" in asked[0]


def test_a_teacher_that_takes_first_frames_has_one_student_which_is_given_them(monkeypatch):
    """By the recipe that gives them, beside the data that its own demo left."""
    (arguments,) = demo_from(monkeypatch, has_first_frame=True)
    assert arguments[arguments.index("--recipe") + 1] == "digits_conditioned" and "base/dataset" in arguments
    assert load_recipe("digits_conditioned").data.conditioning[0].startswith("first_frame")


@pytest.mark.slow
def test_students_are_judged_and_drawn(quick_demo, tmp_path, capsys):
    """With copies of a base, hardly trained, for students: all of it but their training."""
    for calls in (4, 2, 1):
        shutil.copytree(quick_demo / "bundle", tmp_path / "out" / f"calls{calls}" / "bundle")
    options = ["--bundle", str(quick_demo / "bundle"), "--out", str(tmp_path / "out"), "--stride", "48"]
    assert distill_demo.main(options) == 0
    found = read_json(tmp_path / "out" / "score.json")
    teacher, *students = found.values()
    assert (teacher["function_evaluations"], students[0]["function_evaluations"]) == (20, 10), (
        "whatever its bundle's own way"
    )
    assert teacher["distance"] != students[0]["distance"] and all(each == students[0] for each in students)
    told = capsys.readouterr().out
    assert told.count("1.00    1.00") == 1 and "first frame" not in told
    assert (tmp_path / "out" / "distilled.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_student_is_judged_by_what_it_makes_of_first_frames(quick_demo, tmp_path, capsys):
    base, out = tmp_path / "given" / "bundle", tmp_path / "out"
    write_able_bundle(quick_demo / "bundle", base)
    shutil.copy(quick_demo / "classifier.safetensors", base.parent)
    shutil.copytree(base, out / "calls4" / "bundle")
    assert distill_demo.main(["--bundle", str(base), "--out", str(out), "--stride", "48"]) == 0
    found = read_json(out / "score.json")
    assert found.keys() == {"teacher", "4 calls"}
    assert all(each["first_frame"].keys() == {"digit", "every_frame", "colour", "direction"} for each in found.values())
    assert "first frame: digit" in capsys.readouterr().out
