"""Options of `megadit prepare videos|images|hf|butterfly` that no other test gives: each changes what is prepared."""

import numpy as np
import pytest
import torch
from PIL import Image

from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer
from megadit.train.data.ingest import stages
from megadit.train.data.prepare import command as prepare

SMALL = ("--height", "64", "--width", "64", "--num_frames", "9", "--num_workers", "0", "--tokenizer", "pixels")
SELECTED = ("--stages", "fetch,scan,select")
ENCODED = ("--num_frames", "1", "--stages", "fetch,scan,select,encode")


@pytest.fixture(scope="module")
def sources(tmp_path_factory, make_clip, make_pan):
    """Videos with a change of scene, twice the same, dark and still ones; pictures of two sizes, and one of nothing."""
    root = tmp_path_factory.mktemp("sources")
    for name in ("videos", "images"):
        (root / name).mkdir()
    frames = make_pan("china.jpg", 24, 96, 128, start=(100, 60))
    make_clip(root / "videos" / "cut.mp4", np.concatenate([frames[:12] // 4, 255 - frames[12:] // 4]))
    make_clip(root / "videos" / "dark.mp4", frames[:9] // 40)
    make_clip(root / "videos" / "still.mp4", np.repeat(frames[:1], 9, axis=0))
    slow = make_clip(root / "videos" / "slow.mp4", make_pan("flower.jpg", 18, 96, 128, flip=1, start=(50, 200)))
    (root / "videos" / "slow-copy.mp4").write_bytes(slow.read_bytes())
    for number, name in enumerate(("china.jpg", "flower.jpg")):
        picture = make_pan(name, 1, 96 + 32 * number, 128, start=(100, 60))[0]
        Image.fromarray(picture).save(root / "images" / f"{number}.png")
        (root / "images" / f"{number}.txt").write_text(f"picture {number}")
    again = root / "images" / "again.png"
    again.write_bytes((root / "images" / "0.png").read_bytes())
    again.with_suffix(".txt").write_text("the same picture in other words")
    stripes = Image.fromarray(make_pan("flower.jpg", 1, 96, 128, flip=2, start=(90, 80))[0])
    stripes.putalpha(Image.fromarray(np.tile(np.repeat([0, 255], 16), (96, 4)).astype(np.uint8)))
    stripes.save(root / "images" / "stripes.png")
    Image.new("RGB", (128, 96), "red").save(root / "images" / "plain.png")
    (root / "captions.csv").write_text("file_name,text\nslow.mp4,a flower\ncut.mp4,two scenes\n")
    HaarTokenizer.fit([torch.rand(4, 3, 9, 32, 32)], channels=8).save(root / "tokenizer")
    HashedWordEncoder(dim=16).save(root / "words")
    return root


@pytest.fixture(scope="module")
def plain() -> dict:
    """Kind -> what its preparation without an option left; the first test that needs it makes it."""
    return {}


@pytest.fixture
def seen(sources, tmp_path, capsys, monkeypatch):
    """seen(kind, *options): what a preparation left and said, but for the place it was given."""
    pools = []

    def note(num_workers, **settings):
        pools.append(num_workers)
        return pool(0, **settings)

    pool = stages.Pool
    monkeypatch.setattr(stages, "Pool", note)

    def seen(kind, *options):
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        pools.clear()
        code = prepare.main([kind, str(sources / kind), str(out), *SMALL, *options])
        told = capsys.readouterr()
        notes = [(path, path.read_text()) for path in sorted(out.glob("prepare/*.jsonl"))]
        return {
            "error": told.err.splitlines()[-1].replace(str(out), "") if code else "",
            "notes": [(path.name, text) for path, text in notes],
            "shards": [path.read_bytes() for path in sorted(out.glob("*.tar"))],
            "pools": list(pools),
        }

    return seen


@pytest.mark.parametrize(
    ("kind", "flag", "value"),
    [
        ("videos", "--sizes", "64x80"),
        ("videos", "--fps", "12"),
        ("videos", "--cut", "length"),
        ("videos", "--scene_threshold", "255"),
        ("videos", "--min_brightness", "0"),
        ("videos", "--min_motion", "0"),
        ("videos", "--overlap", ""),
        ("videos", "--max_duplicate_bits", "-1"),
        ("videos", "--max_minutes", "0.0145"),
        ("videos", "--val_share", "0"),
        ("videos", "--seed", "1"),
        ("videos", "--captions", "{sources}/captions.csv"),
        ("images", "--min_contrast", "0"),
        ("images", "--max_megapixels", "0.014"),
        ("images", "--duplicates", "any_caption"),
        ("images", "--background", "white"),
    ],
)
def test_an_option_changes_what_is_selected(seen, plain, sources, kind, flag, value):
    frames = ("--num_frames", "1") if kind == "images" else ()
    before = plain.get(kind) or plain.setdefault(kind, seen(kind, *frames, *SELECTED))
    changed = seen(kind, *frames, *SELECTED, *filter(None, (flag, value.format(sources=sources))))
    assert before["notes"] and (before["error"], changed["error"]) == ("", "")
    assert changed["notes"] != before["notes"]


def test_nothing_differs_without_a_change(seen):
    assert seen("videos", *SELECTED) == seen("videos", *SELECTED)


def test_given_encoders_and_processes(seen, sources):
    plain = seen("images", *ENCODED)
    for flag, place in (("--tokenizer", "tokenizer"), ("--text_encoder", "words")):
        changed = seen("images", *ENCODED, flag, str(sources / place))
        assert not changed["error"] and changed["shards"] != plain["shards"], flag
    assert set(plain["pools"]) == {0}
    assert set(seen("images", "--num_frames", "1", *SELECTED, "--num_workers", "3")["pools"]) == {3}


def test_a_preparation_is_begun_anew(sources, tmp_path, capsys):
    command = ["videos", str(sources / "videos"), str(tmp_path / "out"), *SMALL, *SELECTED]
    assert prepare.main(command) == 0
    assert prepare.main([*command, "--fps", "12"]) == 2
    said = capsys.readouterr().err
    assert "begun with fps=24.0, and this command has 12.0" in said and "--overwrite" in said
    assert prepare.main([*command, "--fps", "12", "--overwrite"]) == 0
    assert '"fps": 12.0' in (tmp_path / "out/prepare/settings.json").read_text()
    for mistake in ("--tokenizer haar --sizes 50x50", "--background blanc", "--encodings nowhere", "--redo first"):
        assert prepare.main([*command, "--overwrite", *mistake.split()]) == 2, mistake
    assert '"fps": 12.0' in (tmp_path / "out/prepare/settings.json").read_text()


def test_only_a_data_set_is_begun_anew(sources, tmp_path):
    for name in ("prepare/notes.txt", "megadit.json"):  # a folder of that name, and a bundle
        file = tmp_path / name.replace("/", "_") / name
        file.parent.mkdir(parents=True)
        file.write_text("{}")
        out = tmp_path / name.replace("/", "_")
        assert prepare.main(["videos", str(sources / "videos"), str(out), *SMALL, *SELECTED, "--overwrite"]) == 2
        assert file.is_file()


def test_tables_of_a_split_into_a_folder_of_its_own(sources, tmp_path, capsys, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for split, number in (("train", 0), ("test", 1)):
        picture = (sources / f"images/{number}.png").read_bytes()
        rows = {"image": [{"bytes": picture, "path": None}], "text": [f"of {split}"]}
        parquet.write_table(pyarrow.table(rows), tmp_path / f"{split}.parquet")
    command = ["butterfly", "--source", str(tmp_path), *SMALL, "--num_frames", "1", *SELECTED]
    for split, more in (("train", ()), ("test", ("--split", "test"))):
        assert prepare.main([*command, "--output_dir", str(tmp_path / split), *more]) == 0
        (line,) = (tmp_path / split / "prepare/sources.jsonl").read_text().splitlines()
        assert f'"caption": "of {split}"' in line
    monkeypatch.chdir(tmp_path)
    assert prepare.main([*command, "--split", "test"]) == 0 and (tmp_path / "butterfly_webdataset/prepare").is_dir()
    assert prepare.main([*command, str(tmp_path / "placed"), "--split", "test"]) == 0 and (tmp_path / "placed").is_dir()
    assert prepare.main([*command, "--output_dir", str(tmp_path / "none"), "--split", "val"]) == 2
    assert "no Parquet files of a split 'val'" in capsys.readouterr().err
