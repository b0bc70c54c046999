"""`--judge_dir`: the scores of a program of the user's own as figures of `evaluate` and `tune-sampler`."""

import shutil

import pytest
import torch

from megadit.infer import tune_sampler
from megadit.infer.evaluate import command
from megadit.infer.evaluate.judged import JudgeScorer
from megadit.models.bundle.bundle import Bundle
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json

from .conftest import write_folder

PROGRAM = """
BETTER = {"dark": "lower", "words": "higher"}

def judge(video, prompt):
    if "rude" in prompt:
        raise ValueError("rude")
    return {"dark": float(255 - video.mean()), "words": len(prompt.split()), "other": 1.0}
"""
VIDEOS = torch.stack([torch.full((2, 4, 4, 3), value, dtype=torch.uint8) for value in (0, 55)])


def judge_in(folder, program=PROGRAM):
    folder.mkdir(exist_ok=True)
    (folder / "judge.py").write_text(program)
    return folder


@pytest.fixture
def judge_dir(tmp_path):
    return judge_in(tmp_path / "judge")


def test_columns_are_the_scores_of_which_it_says_what_is_better(judge_dir):
    scorer = JudgeScorer.open(judge_dir)
    assert scorer.columns == ("dark", "words") and scorer.better == {"dark": "lower", "words": "higher"}
    assert scorer(VIDEOS, ["a b", "a b c"]).tolist() == [[255, 2], [200, 3]]
    with pytest.raises(UserError, match="the judge gives no dark, words of a video of 'how rude'"):
        scorer(VIDEOS, ["a", "how rude"])


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (PROGRAM.replace("BETTER", "WORSE"), "defines no BETTER"),
        (PROGRAM.replace('"higher"', '"more"'), "'higher' or 'lower'"),
        (PROGRAM.replace('"higher"', "[]"), "'higher' or 'lower'"),
        (PROGRAM.replace("BETTER = {", "BETTER = 1 or {"), "'higher' or 'lower'"),
    ],
)
def test_what_is_better_has_to_be_said(tmp_path, program, message):
    with pytest.raises(UserError, match=message):
        JudgeScorer.open(judge_in(tmp_path / "judge", program))


def test_scores_are_kept_as_long_as_nothing_of_the_judge_changes(judge_dir):
    first = JudgeScorer.open(judge_dir).fingerprint
    (judge_dir / "weights").write_bytes(b"1")
    second = JudgeScorer.open(judge_dir).fingerprint
    (judge_dir / "weights").write_bytes(b"2")
    assert len({first, second, JudgeScorer.open(judge_dir).fingerprint}) == 3
    (judge_dir / "weights").unlink()
    assert JudgeScorer.open(judge_dir).fingerprint == first


def test_somebody_elses_videos_are_judged(tmp_path, judge_dir):
    """Without captions, too, and with no real ones."""
    videos, out = write_folder(tmp_path / "videos", 9, captions=False), tmp_path / "out"
    assert command.main([str(each) for each in ("--videos", videos, "--out", out, "--judge_dir", judge_dir)]) == 0
    dark, words = read_json(out / "report.json")["figures"]
    assert (dark["metric"], dark["better"], words["metric"], words["better"]) == ("dark", "lower", "words", "higher")
    assert dark["low"] < dark["value"] < dark["high"] < 255 and words["value"] == 0
    assert "mean of dark, words" in (out / "report.html").read_text()


def test_the_cheapest_way_to_sample_is_found_by_a_judge_alone(tmp_path, bundle_dir, judge_dir, capsys):
    """Of two programs that differ in which is better: one praises what the other blames."""
    shutil.copytree(bundle_dir, tmp_path / "bundle")
    own = Bundle.open(tmp_path / "bundle").defaults
    real = write_folder(tmp_path / "real", 40, size=(own.num_frames, own.height, own.width))
    command = [str(tmp_path / "bundle"), "--real", str(real), "--device", "cpu", "--dtype", "float32", "--dry_run"]
    command += ["--count", "8", "--evaluations", "2", "--budget", "0"]
    assert tune_sampler.main([*command, "--out", str(tmp_path / "none")]) == 2
    assert "give --extractors, or --judge_dir" in capsys.readouterr().err
    best = {}
    for better in ("lower", "higher"):
        program = PROGRAM.replace('"lower", "words": "higher"}', f"{better!r}}}")
        folder = judge_in(tmp_path / better, program)
        assert tune_sampler.main([*command, "--judge_dir", str(folder), "--out", str(tmp_path / "out")]) == 0
        ways = read_json(tmp_path / "out" / "tuned.json")["ways"]
        assert all(set(way["figures"]) == {"dark by judge"} for way in ways)
        (best[better],) = [way["figures"]["dark by judge"]["value"] for way in ways if way["is_chosen"]]
        assert best[better] == {"lower": min, "higher": max}[better](
            way["figures"]["dark by judge"]["value"] for way in ways
        )
    assert best["lower"] < best["higher"] and Bundle.open(tmp_path / "bundle").defaults == own
    assert "note:" not in capsys.readouterr().out
