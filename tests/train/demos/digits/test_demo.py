"""The demo's driver: stages in order, skipped when done, repeated when interrupted."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megadit.infer.media.video_io import read_video
from megadit.models.shared.cli.command import run_module
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_json
from megadit.train.demos import stages
from megadit.train.demos.clips import wall, watchable, write_clips
from megadit.train.demos.digits import demo as demo_module
from megadit.train.demos.digits.demo import FULL, QUICK, Demo
from megadit.train.demos.digits.evaluation import ALL_GUIDANCES
from megadit.train.demos.stages import Stage, TrainingDemo
from megadit.train.plan.hardware import Gpu

JOBS = Path(__file__).parents[2] / "jobs"
CORE = Gpu(
    name="a core",
    memory=1e9,
    bf16_flops=1e11,
    memory_bandwidth=1e10,
    link_bandwidth=1e9,
    network_bandwidth=1e9,
    is_cpu=True,
)
SCORES = {"digit": 0.9, "colour": 1.0, "direction": 1.0, "all": 0.9, "every_frame": 0.5, "num_clips": 3}


@pytest.fixture
def demo(tmp_path) -> Demo:
    return Demo(out=tmp_path / "demo", size=QUICK)


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """Three stages that only say that they ran."""
    calls: list[str] = []

    def stage(name: str, file: str, content: dict) -> Stage:
        def run(demo: Demo) -> None:
            calls.append(name)
            write_json(demo.out / file, content)

        return Stage(name, "pretend", run, lambda demo: [demo.out / file])

    score = {**SCORES, "unseen_combinations": SCORES, "real": SCORES}
    stages = (stage("prepare", "a.json", {}), stage("train", "b.json", {}), stage("score", "score.json", score))
    monkeypatch.setattr(demo_module, "STAGES", stages)
    return calls


def test_a_second_run_skips_what_is_done(demo, log, capsys):
    demo_module.run_demo(demo)
    assert log == ["prepare", "train", "score"]
    assert "already done" not in capsys.readouterr().out
    demo_module.run_demo(demo)
    assert log == ["prepare", "train", "score"]
    output = capsys.readouterr().out
    assert output.count("already done") == 3 and "90.0%" in output
    assert set(read_json(demo.out / "score.json")["seconds"]) == {"prepare", "train", "score"}


def test_a_stage_without_its_result_runs_again(demo, log):
    demo_module.run_demo(demo)
    (demo.out / "b.json").unlink()
    demo_module.run_demo(demo)
    assert log == ["prepare", "train", "score", "train"]


def test_the_time_of_all_stages_is_told_first_and_corrected_after_each(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stages, "this_device", lambda ranks: replace(CORE, small_speed=0.5))
    now = iter([0.0, 40.0, 40.0, 41.0])
    monkeypatch.setattr(stages, "time", SimpleNamespace(monotonic=lambda: next(now)))
    touch = [lambda demo, name=name: (demo.out / name).touch() for name in ("a", "b")]
    made = [lambda demo, name=name: [demo.out / name] for name in ("a", "b")]
    first = Stage("first", "pretend", touch[0], made[0], lambda demo, core: 10 / core.small_speed)
    last = Stage("last", "pretend", touch[1], made[1], lambda demo, core: 60 * demo.num_ranks)
    stages.run_stages(TrainingDemo(out=tmp_path), [first, last])
    output = capsys.readouterr().out
    assert output.startswith("about 2 min 20 s on this machine, as measured: first 20 s, last 2 min 0 s\n")
    assert "      40 s; about 4 min 0 s left\n" in output and output.endswith("      1 s\n"), (
        "twice as long as expected"
    )
    stages.run_stages(TrainingDemo(out=tmp_path), [first, last])
    assert "as measured" not in capsys.readouterr().out, "nothing is left"


def test_every_stage_of_the_demo_is_expected_to_take_some_time(tmp_path):
    quick, full = (
        [stage.seconds(Demo(out=tmp_path, size=size), CORE) for stage in demo_module.STAGES] for size in (QUICK, FULL)
    )
    assert all(0 < one <= other for one, other in zip(quick, full, strict=True))
    assert 60 < sum(quick) < 0.5 * sum(full) < 900


def test_a_failing_stage_stops_the_demo(demo, log, monkeypatch):
    def fail(demo: Demo) -> None:
        raise UserError("no luck")

    first, _, last = demo_module.STAGES
    broken = Stage("train", "pretend", fail, lambda demo: [demo.out / "b.json"])
    monkeypatch.setattr(demo_module, "STAGES", (first, broken, last))
    with pytest.raises(UserError, match="no luck"):
        demo_module.run_demo(demo)
    assert log == ["prepare"] and not (demo.out / "score.json").exists()


def test_a_child_that_fails_is_told_with_its_command():
    with pytest.raises(UserError, match="ended with exit code 2"):
        run_module("megadit.train", "--recipe", "no_such_recipe")


def test_mp4s_play_every_pixel_several_times():
    clip = torch.rand(3, 9, 32, 32) * 2 - 1
    frames = watchable(clip, 8)
    assert frames.shape == (27, 256, 256, 3)
    assert (frames[:9] == frames[18:]).all()
    assert (frames[4, 8:16, 16:24] == frames[4, 8, 16]).all()


def test_the_wall_shows_each_clip_in_its_place():
    clips = torch.arange(7.0).reshape(7, 1, 1, 1, 1).expand(7, 3, 2, 4, 4)
    sheet = wall(clips, columns=3)
    assert sheet.shape == (3, 2, 12, 12)
    assert sheet[0, 1, ::4, ::4].tolist() == [[0, 1, 2], [3, 4, 5], [6, -1, -1]]


def test_the_showcase_has_both_kinds_of_combination(demo, monkeypatch):
    seen, unseen = demo.attributes
    clips = torch.zeros(len(seen) + len(unseen), 3, 9, 32, 32)
    monkeypatch.setattr(demo_module, "read_clips", lambda path: clips)
    shown, attributes, captions = demo_module._showcase(demo)
    assert len(shown) == len(attributes) == len(captions) == 24
    assert sum(a in unseen for a in attributes) == 6


def test_no_ranks(tmp_path):
    with pytest.raises(UserError, match="--ranks=0 must be at least 1"):
        demo_module.main(["--out", str(tmp_path), "--ranks", "0", "--debug"])
    assert not list(Path(tmp_path).iterdir())


def test_every_option_reaches_the_demo(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(demo_module, "run_demo", asked.append)
    for more in ([], ["--out", str(tmp_path)], ["--ranks", "5"], ["--quick"], ["--all_guidances"]):
        assert demo_module.main(more) == 0
    plain, placed, divided, quick, whole = asked
    assert placed == replace(plain, out=tmp_path) != plain
    assert divided == replace(plain, num_ranks=5) != plain
    assert quick == replace(plain, size=QUICK) != plain
    assert whole == replace(plain, guidances=ALL_GUIDANCES) != plain


def test_clips_are_written_under_their_captions_and_all_together(tmp_path):
    clips = torch.linspace(-1, 1, 8 * 3 * 9 * 8 * 8).reshape(8, 3, 9, 8, 8)
    captions = [f"a red {number}" for number in range(8)]
    write_clips(tmp_path, clips, captions, fps=8.0, zoom=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*(f"0{n}-a-red-{n}.mp4" for n in range(8)), "all.mp4"]
    (one, _), (everything, _) = (read_video(tmp_path / name) for name in ("03-a-red-3.mp4", "all.mp4"))
    assert one.shape == (27, 32, 32, 3) and everything.shape == (27, 32, 96, 3)


def test_a_training_stage_asks_for_the_demos_folders_ranks_and_settings(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(stages, "run_module", lambda *arguments: asked.append(arguments))
    demo = TrainingDemo(out=tmp_path, num_ranks=3)
    demo.training.mkdir()
    train, bundle = stages.training_stages("digits", "here", lambda demo: ["train.seed=7"])
    for stage in (train, bundle):
        assert not any(path.exists() for path in stage.results(demo))
        stage.run(demo)
    folders = f"data.path={demo.dataset}", f"train.output_dir={demo.training}"
    assert asked == [
        ("megadit.train", "--recipe", "digits", "--nproc", "3", *folders, "train.seed=7"),
        ("megadit.train.checkpoints.to_bundle", str(demo.training), str(demo.bundle)),
    ]
    assert train.results(demo)[0].exists() and "`digits` here" in train.purpose


@pytest.mark.slow
def test_no_product_is_emulated_where_the_processor_has_no_half_precision(run_ranks, tmp_path):
    told = run_ranks(1, JOBS / "half_products.py", tmp_path / "demo")[0]
    counted = json.loads(told.splitlines()[-1])
    assert counted == {stage.name: [] for stage in demo_module.STAGES}
