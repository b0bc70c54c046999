"""A source that changed after it was prepared, or while: it is said what did, and an update is a fresh preparation."""

import json
import os

import pytest

from megadit.train.data.ingest.clips import scan
from megadit.train.data.prepare import command as prepare

from .test_account import OPTIONS, bytes_under, picture


def write(root, number: int, seed: int) -> None:
    (root / f"{number}.png").write_bytes(picture(seed))
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


CHANGED = "1 new, 1 another file now, 1 of another caption or score, 1 gone"


def test_an_update_leaves_what_a_fresh_preparation_leaves(source, tmp_path, capsys, monkeypatch):
    command = ["images", str(source), str(tmp_path / "out"), *OPTIONS]
    assert prepare.main(command) == 0
    assert prepare.main(command) == 0 and "is already prepared; nothing to do" in capsys.readouterr().out
    change(source)
    before = bytes_under(tmp_path / "out")
    assert prepare.main(command) == 0
    said = capsys.readouterr().out
    assert "its source has changed since: " in said and all(part in said for part in CHANGED.split(", "))
    assert bytes_under(tmp_path / "out") == before

    scanned, scan_image = [], scan._scan_image
    monkeypatch.setattr(
        scan, "_scan_image", lambda item, settings: scanned.append(item.name) or scan_image(item, settings)
    )
    assert prepare.main([*command, "--update"]) == 0
    assert sorted(scanned) == ["2.png", "7.png"]
    assert prepare.main(["images", str(source), str(tmp_path / "fresh"), *OPTIONS]) == 0
    assert bytes_under(tmp_path / "out") == bytes_under(tmp_path / "fresh") != before


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
