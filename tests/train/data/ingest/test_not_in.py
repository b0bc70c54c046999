"""`--not_in DATA`: what looks like a clip of another data set is left out of this one."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from megadit.train.data.prepare import command as prepare

COMMAND = ["--sizes", "32x32", "--num_frames", "1", "--tokenizer", "pixels", "--num_workers", "0"]


@pytest.fixture(scope="module")
def picture(make_pan):
    """picture(n): one of its own, whatever n."""
    return lambda number: Image.fromarray(make_pan("china.jpg", 1, 96, 128, start=(40 * number, 90 * number))[0])


def prepared(folder, out, *options) -> int:
    return prepare.main(["images", str(folder), str(out), *COMMAND, *options])


@pytest.fixture
def run(tmp_path):
    """run(folder, out, *options): a code."""
    return lambda folder, out, *options: prepared(folder, tmp_path / out, *options)


@pytest.fixture(scope="module")
def tests(tmp_path_factory, picture):
    """A data set of two pictures, one of either split."""
    folder = tmp_path_factory.mktemp("for tests")
    for number in range(2):
        picture(number).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"test {number}")
    out = folder.with_name("tests")
    assert prepared(folder, out, "--val_share", "0.5") == 0
    return out


@pytest.fixture(scope="module")
def sources(tmp_path_factory, picture):
    """Both of them again, darker, smaller, as JPEGs and in other words, a third of its own, and that in other words."""
    folder = tmp_path_factory.mktemp("sources")
    for number in (0, 1, 2):
        darker = (np.asarray(picture(number).resize((96, 72))) * 0.95).astype(np.uint8)
        Image.fromarray(darker).save(folder / f"{number}.jpg", quality=85)
        (folder / f"{number}.txt").write_text(f"train {number}")
    (folder / "again.jpg").write_bytes((folder / "2.jpg").read_bytes())
    (folder / "again.txt").write_text("the third in other words")
    return folder


def test_what_another_data_set_holds_is_left_out(tests, sources, run, tmp_path, capsys):
    assert run(sources, "all") == 0 and "in another" not in capsys.readouterr().out
    assert run(sources, "rest", "--not_in", str(tests)) == 0
    assert "left out: 2 x in another data set (--not_in)" in capsys.readouterr().out
    notes = tmp_path / "rest" / "prepare"
    skips = [json.loads(line) for line in (notes / "skips.jsonl").read_text().splitlines()]
    assert [(skip["source"], skip["reason"], skip["detail"]) for skip in skips] == [
        (f"{number}.jpg", "in another data set", f"{tests}: {number}.png at 0.00 s") for number in (0, 1)
    ]
    kept = [json.loads(line) for split in ("train", "val") for line in (notes / f"{split}.jsonl").open()]
    assert sorted(clip["source"]["name"] for clip in kept) == ["2.jpg", "again.jpg"]


def test_several_are_named_one_by_one(tests, sources, picture, run, tmp_path):
    (tmp_path / "more").mkdir()
    for number in (2, 3):
        picture(number).save(tmp_path / "more" / f"{number}.png")
    assert run(tmp_path / "more", "others") == 0
    sources = shutil.copytree(sources, tmp_path / "sources")
    assert run(sources, "rest", "--not_in", str(tests), "--not_in", str(tmp_path / "others")) == 2  # nothing is left
    picture(4).save(sources / "4.jpg")
    assert run(sources, "rest", "--not_in", str(tests), "--not_in", str(tmp_path / "others"), "--overwrite") == 0
    skips = (tmp_path / "rest" / "prepare" / "skips.jsonl").read_text()
    assert skips.count("others: 2.png") == 2 and skips.count(f"{tests}: ") == 2


def test_what_cannot_be_compared_is_refused_before_anything_is_read(tests, sources, run, tmp_path, capsys):
    for options, message in (
        (["--not_in", str(tmp_path / "nowhere")], "no fingerprints"),
        (["--not_in", str(sources)], "no fingerprints"),
        (["--not_in", str(tmp_path / "out")], "is the data set that is to be made"),
        (["--not_in", str(tests), "--max_duplicate_bits", "-1"], "give one of them"),
    ):
        assert run(sources, "out", *options) == 2
        assert message in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change", [{"fingerprint": "g"}, {"fingerprint": 7}, {"start": "0"}, {"source": []}, {"x": 1}, None]
)
def test_notes_of_strangers_are_refused(tests, sources, run, change, tmp_path, capsys):
    tests = shutil.copytree(tests, tmp_path / "tests")
    plan = tests / "prepare" / "train.jsonl"
    clip = json.loads(plan.read_text())
    plan.write_text("[" if change is None else json.dumps(clip | change))
    assert run(sources, "out", "--not_in", str(tests)) == 2
    assert "train.jsonl, line 1 is no clip of a data set" in capsys.readouterr().err.splitlines()[-1]
