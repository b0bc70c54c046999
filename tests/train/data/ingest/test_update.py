"""A source that changed after it was prepared, or while: it is said what did, and an update is a fresh preparation."""

import io
import json
import os

import numpy as np
import pytest
from PIL import Image

from megadit.train.data.ingest.clips import scan
from megadit.train.data.prepare import command as prepare

OPTIONS = ["--sizes", "16x16", "--num_frames", "1", "--num_workers", "0", "--tokenizer", "pixels", "--val_share", "0"]


def write(root, number: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    (root / f"{number}.png").write_bytes(buffer.getvalue())
    (root / f"{number}.txt").write_text(f"picture {number}")


@pytest.fixture
def source(tmp_path):
    root = tmp_path / "pictures"
    root.mkdir()
    for number in range(6):
        write(root, number, number)
    return root


def change(root) -> None:
    """One is new, one gone, one another, one of another caption."""
    write(root, 7, 7)
    (root / "1.png").unlink()
    (root / "1.txt").unlink()
    write(root, 2, 12)
    os.utime(root / "2.png", ns=(1, 1))
    (root / "3.txt").write_text("another caption")


def tree(root) -> dict[str, bytes]:
    """Names -> contents, but for Energon's id, which is another each time."""
    paths = (path for path in sorted(root.rglob("*")) if path.is_file() and path.name != "index.uuid")
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


CHANGED = "1 new, 1 another file now, 1 of another caption or score, 1 gone"


def test_an_update_leaves_what_a_fresh_preparation_leaves(source, tmp_path, capsys, monkeypatch):
    command = ["images", str(source), str(tmp_path / "out"), *OPTIONS]
    assert prepare.main(command) == 0
    assert prepare.main(command) == 0 and "is already prepared; nothing to do" in capsys.readouterr().out
    change(source)
    before = tree(tmp_path / "out")
    assert prepare.main(command) == 0
    said = capsys.readouterr().out
    assert "its source has changed since: " in said and all(part in said for part in CHANGED.split(", "))
    assert tree(tmp_path / "out") == before

    scanned, scan_image = [], scan._scan_image
    monkeypatch.setattr(
        scan, "_scan_image", lambda item, settings: scanned.append(item.name) or scan_image(item, settings)
    )
    assert prepare.main([*command, "--update"]) == 0
    assert sorted(scanned) == ["2.png", "7.png"]
    assert prepare.main(["images", str(source), str(tmp_path / "fresh"), *OPTIONS]) == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh") != before


def test_a_preparation_does_not_go_on_with_another_source(source, tmp_path, capsys):
    command = ["images", str(source), str(tmp_path / "out"), *OPTIONS]
    assert prepare.main([*command, "--stages", "fetch,scan"]) == 0
    change(source)
    assert prepare.main(command) == 2
    error = capsys.readouterr().err
    assert "was begun with a different source" in error and "--update continues" in error
    assert prepare.main([*command, "--update"]) == 0
    lines = map(json.loads, (tmp_path / "out/prepare/train.jsonl").read_text().splitlines())
    captions = {line["source"]["name"]: line["source"]["caption"] for line in lines}
    assert captions["3.png"] == "another caption" and "1.png" not in captions and "7.png" in captions


def test_rows_of_tables_are_fetched_again_by_another_option(tmp_path, capsys):
    assert prepare.main(["hf", str(tmp_path), str(tmp_path / "out"), *OPTIONS, "--update"]) == 2
    assert "--redo failed" in capsys.readouterr().err
