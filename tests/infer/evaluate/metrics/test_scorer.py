"""`--scorer_dir`: the scores of a program of the user's own as figures of `evaluate` and `tune-sampler`."""

import shutil

import numpy as np
import pytest
import torch

from megadit.infer.commands import tune_sampler
from megadit.infer.evaluate import command
from megadit.infer.evaluate.evaluation import Candidate, Evaluation
from megadit.infer.evaluate.features import FeatureStore
from megadit.infer.evaluate.metrics.scorer import ProgramScorer
from megadit.infer.evaluate.videos import videos_in_memory
from megadit.infer.evaluate.window import Window
from megadit.infer.hooks.scorer import Scorer
from megadit.infer.runtimes.ranks import ALONE
from megadit.models.bundle import Bundle
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json

from ..conftest import write_folder

PROGRAM = """
BETTER = {"dark": "lower", "words": "higher"}

def score(video, prompt):
    if "rude" in prompt:
        raise ValueError("rude")
    return {"dark": float(255 - video.mean()), "words": len(prompt.split()), "other": 1.0}
"""
VIDEOS = torch.stack([torch.full((2, 4, 4, 3), value, dtype=torch.uint8) for value in (0, 55)])


def judge_in(folder, program=PROGRAM):
    folder.mkdir(exist_ok=True)
    (folder / "scorer.py").write_text(program)
    return folder


@pytest.fixture
def scorer_dir(tmp_path):
    return judge_in(tmp_path / "judge")


def test_columns_are_the_scores_of_which_it_says_what_is_better(scorer_dir):
    scorer = ProgramScorer.open(scorer_dir)
    assert scorer.columns == ("dark", "words") and scorer.better == {"dark": "lower", "words": "higher"}
    assert scorer(VIDEOS, ["a b", "a b c"]).tolist() == [[255, 2], [200, 3]]
    with pytest.raises(UserError, match="the scorer returns no dark, words for a video of 'how rude'"):
        scorer(VIDEOS, ["a", "how rude"])


@pytest.mark.parametrize(
    "program",
    [
        PROGRAM.replace("BETTER", "WORSE"),
        PROGRAM.replace('"higher"', '"more"'),
        PROGRAM.replace('"higher"', "[]"),
        PROGRAM.replace('"words": "higher"', '1: "higher"'),
        PROGRAM.replace("BETTER = {", "BETTER = 1 or {"),
        "BETTER = {}" + PROGRAM.replace("BETTER", "WORSE"),
    ],
)
def test_what_is_better_has_to_be_said(tmp_path, program):
    folder = judge_in(tmp_path / "judge", program)
    with pytest.raises(UserError, match="must define which scores are metrics"):
        ProgramScorer.open(folder)
    assert Scorer.load(folder).scores(VIDEOS[0].numpy(), "a")["other"] == 1, "who makes no figures needs none of it"


def test_scores_are_kept_as_long_as_nothing_of_the_judge_changes(scorer_dir):
    first = ProgramScorer.open(scorer_dir).fingerprint
    found = {first}
    (scorer_dir / "model").mkdir()
    for name, content in (("weights", b"1"), ("weights", b"2"), ("config", b"2")):
        (scorer_dir / "model" / name).write_bytes(content)
        found.add(ProgramScorer.open(scorer_dir).fingerprint)
    assert len(found) == 4
    shutil.rmtree(scorer_dir / "model")
    (scorer_dir / "__pycache__").mkdir(exist_ok=True)
    (scorer_dir / "__pycache__" / "judge.pyc").write_bytes(b"1")
    assert ProgramScorer.open(scorer_dir).fingerprint == first


def test_somebody_elses_videos_are_judged(tmp_path, scorer_dir):
    """Without captions, too, and with no real ones."""
    videos, out = write_folder(tmp_path / "videos", 9, captions=False), tmp_path / "out"
    assert command.main([str(each) for each in ("--videos", videos, "--out", out, "--scorer_dir", scorer_dir)]) == 0
    dark, words = read_json(out / "report.json")["metrics"]
    assert (dark["metric"], dark["better"], words["metric"], words["better"]) == ("dark", "lower", "words", "higher")
    assert dark["low"] < dark["value"] < dark["high"] < 255 and words["value"] == 0
    assert "standard deviations from the mean of dark, words" in (out / "report.html").read_text()


def test_the_best_are_those_of_the_better_scores(tmp_path, scorer_dir):
    """Of scores of any scale, higher or lower."""
    window = Window(frames=2, height=4, width=4, fps=8.0, is_resized=False)
    brightness, words = [10, 90, 50, 70], [1, 1, 1, 2]
    video = np.repeat(np.array(brightness, np.uint8), 2 * 4 * 4 * 3).reshape(-1, 2, 4, 4, 3)
    made = videos_in_memory("made", video, [" ".join("a" * count) for count in words], 8.0)
    candidate = Candidate(model="made", guidance=None, videos=made)
    of = Evaluation(
        store=FeatureStore(tmp_path / "features", window),
        real=None,
        extractors=(),
        scorers=[ProgramScorer.open(scorer_dir)],
    )
    of.compute_features([candidate], ALONE, shows_progress=False)
    assert of.quality(candidate)[0].argsort(descending=True).tolist() == [3, 1, 2, 0]


def test_scores_over_guidance_are_drawn_where_nothing_else_is_there(tmp_path, scorer_dir, bundle_dir):
    (tmp_path / "prompts.txt").write_text("\n".join(f"square {number}" for number in range(8)))
    asked = ("--prompts", tmp_path / "prompts.txt", "--guidances", 1, 4, "--scorer_dir", scorer_dir, "--out", tmp_path)
    assert command.main([str(each) for each in (bundle_dir, *asked)]) == 0
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_the_cheapest_way_to_sample_is_found_by_a_judge_alone(tmp_path, bundle_dir, scorer_dir, capsys):
    """Of two programs that differ in which is better: one praises what the other blames."""
    shutil.copytree(bundle_dir, tmp_path / "bundle")
    own = Bundle.open(tmp_path / "bundle").defaults
    real = write_folder(tmp_path / "real", 40, size=(own.num_frames, own.height, own.width))
    command = [str(tmp_path / "bundle"), "--real", str(real), "--device", "cpu", "--dtype", "float32", "--dry_run"]
    command += ["--count", "8", "--function_evaluations", "2", "--budget", "0"]
    assert tune_sampler.main([*command, "--out", str(tmp_path / "none")]) == 2
    judged = ["--scorer_dir", str(scorer_dir), "--out", str(tmp_path / "none")]
    assert tune_sampler.main([*command, *judged, "--metrics", "kid"]) == 2
    assert capsys.readouterr().err.count("give --extractors, or --scorer_dir") == 2
    best = {}
    for better in ("lower", "higher"):
        program = PROGRAM.replace('"lower", "words": "higher"}', f"{better!r}}}")
        folder = judge_in(tmp_path / better, program)
        assert tune_sampler.main([*command, "--scorer_dir", str(folder), "--out", str(tmp_path / "out")]) == 0
        variants = read_json(tmp_path / "out" / "tuned.json")["candidates"]
        assert all(set(variant["metrics"]) == {"dark by scorer"} for variant in variants)
        (best[better],) = [
            variant["metrics"]["dark by scorer"]["value"] for variant in variants if variant["is_chosen"]
        ]
        assert best[better] == {"lower": min, "higher": max}[better](
            variant["metrics"]["dark by scorer"]["value"] for variant in variants
        )
    assert best["lower"] < best["higher"] and Bundle.open(tmp_path / "bundle").defaults == own
    assert "note:" not in capsys.readouterr().out
