"""`--scorer_dir DIR --min_score NAME=SCORE --max_score NAME=SCORE`: a program of the user's own judges clips."""

import json

import numpy as np
import pytest
from PIL import Image

from megadit.models.shared.files import read_json
from megadit.train.data.prepare import command as prepare

COUNT = 8
JUDGE = """
import json
import pathlib

import numpy

HERE = pathlib.Path(__file__).parent
SCALE = json.loads((HERE / "scale.json").read_text())

def score(video, caption):
    assert video.dtype == numpy.uint8 and video.shape == (1, 32, 32, 3)
    with open(HERE / "asked.txt", "a") as file:
        file.write(caption + "\\n")
    if caption in SCALE["fails"]:
        raise RuntimeError("no model")
    return {"red": video[..., 0].mean() / SCALE["full"], "blue": video[..., 2].mean() / SCALE["full"]}
"""


@pytest.fixture
def scorer(tmp_path):
    """A folder with a program and what it needs."""
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "scorer.py").write_text(JUDGE)
    (folder / "scale.json").write_text(json.dumps({"full": 255, "fails": []}))
    return folder


@pytest.fixture
def run(scorer, tmp_path):
    """Of pictures the reddest is the last, the bluest the first: run(*options) is the code of a preparation."""
    source = tmp_path / "pictures"
    source.mkdir()
    for number in range(COUNT):
        red = 32 * number
        noise = np.random.default_rng(number).integers(0, 256, (32, 32), np.uint8)
        channels = [np.full((32, 32), red), noise, np.full((32, 32), 255 - red)]
        Image.fromarray(np.stack(channels, -1).astype(np.uint8)).save(source / f"{number}.png")
        (source / f"{number}.txt").write_text(f"number {number}")

    def run(*options: str) -> int:
        command = ["images", str(source), str(tmp_path / "out"), "--sizes", "32x32", "--tokenizer", "pixels"]
        command += ["--num_workers", "0", "--val_share", "0", "--max_duplicate_bits", "-1", "--num_frames", "1"]
        return prepare.main([*command, "--scorer_dir", str(scorer), *options])

    return run


def skips(out) -> dict[str, tuple[str, str]]:
    lines = map(json.loads, (out / "prepare" / "skips.jsonl").read_text().splitlines())
    return {skip["caption"]: (skip["reason"], skip["detail"]) for skip in lines}


def test_clips_beyond_a_limit_are_left_out_with_their_score(run, tmp_path, capsys):
    assert run("--min_score", "red=0.2", "--max_score", "red=0.8", "--max_score", "blue=0.7") == 0
    assert skips(tmp_path / "out") == {
        "number 0": ("low score: red", "0"),
        "number 1": ("low score: red", f"{32 / 255:g}"),
        "number 2": ("high score: blue", f"{191 / 255:g}"),
        "number 7": ("high score: red", f"{224 / 255:g}"),
    }
    counts = {"low score: red": 2, "high score: blue": 1, "high score: red": 1}
    assert read_json(tmp_path / "out" / "report.json")["skips"] == counts
    assert "left out: 2 x low score: red" in capsys.readouterr().out


def test_a_killed_run_judges_nothing_twice(run, scorer, tmp_path):
    notes, limit = tmp_path / "out" / "prepare", ("--min_score", "red=0.2", "--stages", "fetch,scan,select")
    assert run(*limit) == 0
    plan, scores = (notes / "train.jsonl").read_bytes(), (notes / "scores.jsonl").read_bytes().splitlines(keepends=True)
    (notes / "selection.json").unlink()
    (notes / "scores.jsonl").write_bytes(b"".join(scores[:5]) + scores[5][:9])
    (scorer / "asked.txt").unlink()
    assert run(*limit) == 0 and (notes / "train.jsonl").read_bytes() == plan
    assert len((scorer / "asked.txt").read_text().splitlines()) == COUNT - 5


def test_what_a_judge_failed_at_is_left_out_until_it_is_tried_again(run, scorer, tmp_path, capsys):
    scale = scorer / "scale.json"
    scale.write_text(json.dumps({"full": 255, "fails": ["number 5"]}))
    assert run("--min_score", "red=0.2") == 0
    assert skips(tmp_path / "out")["number 5"] == ("no score: red", "") and "no model" in capsys.readouterr().err
    assert run("--min_score", "red=0.2", "--redo", "failed") == 0, "it fails again, and all else is kept"
    assert skips(tmp_path / "out")["number 5"] == ("no score: red", "") and list((tmp_path / "out").glob("train-*.tar"))
    scale.write_text(json.dumps({"full": 255, "fails": []}))
    assert run("--min_score", "red=0.2", "--redo", "failed") == 0
    assert set(skips(tmp_path / "out")) == {"number 0", "number 1"}
    assert (scorer / "asked.txt").read_text().splitlines().count("number 4") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min_score", "read=0.2"], "no score 'read' for 8 clips; its scores: blue, red"),
        (["--min_score", "red"], "--min_score red: write NAME=SCORE"),
        (["--max_score", "red=nan"], "--max_score red=nan: write NAME=SCORE"),
        (["--scorer_dir", "nowhere"], "there is no scorer.py"),
    ],
)
def test_a_mistake_is_one_line(run, options, message, capsys):
    assert run(*options) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_limits_without_a_judge_are_refused(tmp_path, capsys):
    assert prepare.main(["images", str(tmp_path), str(tmp_path / "out"), "--min_score", "red=0.5"]) == 2
    assert "give --scorer_dir DIR, too" in capsys.readouterr().err
