"""Links in a folder that somebody else filled are not followed out of it, whichever command reads the folder."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import megadit.models
from megadit.export.build import _check_place
from megadit.infer.evaluate.videos import open_videos
from megadit.infer.media.reader import MediaReader
from megadit.infer.media.video_io import write_video
from megadit.infer.pictures import picture_files
from megadit.models.commands.push_pull import push_bundle
from megadit.models.diffusion.conditioning_settings import MediaLimits
from megadit.models.shared.cli.command import run_module
from megadit.models.shared.errors import UserError
from megadit.models.shared.outside import check_own, files_under, leads_out, walk
from megadit.models.storage.license import find_license
from megadit.serve.repository.network_config import write_model
from tests.serve.media import GIF


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "clips"
    root.mkdir()
    write_video(tmp_path / "private.png", np.zeros((1, 8, 8, 3), np.uint8))
    (tmp_path / "secret.txt").write_text("secret")
    (root / "a.png").symlink_to(tmp_path / "private.png")
    return root


def test_links_are_found_with_the_reason(folder, tmp_path):
    (folder / "up").symlink_to("..")
    (folder / "round").symlink_to(".")
    os.mkfifo(folder / "pipe")
    found = {each.name: each.reason for each in walk(folder)}
    assert found.pop("pipe") == "not a file" and found.pop("round") == "linked folder that is read elsewhere"
    assert set(found) == {"a.png", "up"} and all("--follow_links" in reason for reason in found.values())
    assert leads_out(folder / "a.png", folder) and not leads_out(folder, folder)
    followed = {each.name for each in walk(folder, follow_links=True) if not each.reason}
    assert "a.png" in followed and "up/secret.txt" in followed and not any("clips/" in name for name in followed)


def test_what_is_copied_of_a_bundle_is_its_own(folder, tmp_path):
    """Its export, a repository and converted weights would carry a file of the reader's on; hubs' caches are links."""
    for name, kind in {"LICENSE": "link", ".hidden": "link", "pipe": "pipe", "round": "folder"}.items():
        bundle = tmp_path / name
        (bundle / "transformer").mkdir(parents=True)
        place = bundle / "transformer" / name
        os.mkfifo(place) if kind == "pipe" else place.symlink_to(tmp_path / "secret.txt" if kind == "link" else "..")
        with pytest.raises(UserError, match=f"{name} is no file of"):
            check_own(bundle)
        with pytest.raises(UserError, match="leads elsewhere"):
            write_model(tmp_path / "repository", "a", config="", module="", bundle=bundle)
        with pytest.raises(UserError, match="leads elsewhere"):
            push_bundle(bundle, "memory://a")
        with pytest.raises(UserError, match="leads elsewhere"):
            _check_place(SimpleNamespace(path=bundle), tmp_path / "out")
    (folder / "LICENSE").symlink_to(tmp_path / "secret.txt")
    assert not find_license(folder, "wan").files and not (tmp_path / "repository").exists()
    cached, blobs = tmp_path / "hub/snapshots/1/transformer", tmp_path / "hub/blobs"
    cached.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "secret.txt").touch()
    (cached / "LICENSE").symlink_to("../../../blobs/secret.txt")
    check_own(cached)
    assert find_license(cached, "wan").files == (cached / "LICENSE",)
    (blobs / "secret.txt").unlink()
    blobs.rmdir()
    blobs.symlink_to(tmp_path)
    with pytest.raises(UserError, match="LICENSE is no file of"):
        check_own(cached.parent)


def test_a_folder_that_cannot_be_read_is_told(folder, monkeypatch):
    (folder / "closed").mkdir()
    scan = os.scandir

    def refused(path):
        if path.endswith("closed/"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert {each.reason for each in walk(folder) if each.name == "closed"} == {
        "folder that cannot be read: Permission denied"
    }


def test_readers_of_pictures_read_none_from_outside(folder, tmp_path):
    with pytest.raises(UserError, match="holds no picture"):
        list(picture_files([folder]))
    with pytest.raises(UserError, match="holds no videos"):
        open_videos(folder)
    (folder / "a.png").unlink()
    write_video(folder / "a.png", np.zeros((1, 8, 8, 3), np.uint8))
    (folder / "a.txt").symlink_to(tmp_path / "secret.txt")
    assert files_under(folder) == [folder / "a.png"] == list(picture_files([folder]))
    assert [part.prompts for part in open_videos(folder).parts] == [("",)]


def test_no_process_of_ours_imports_from_the_current_folder(tmp_path, monkeypatch):
    """`python -m` does by default: a command in a folder of somebody else's data would run its `json.py`."""
    for name in ("json", "numpy", "yaml", "av", "torch", "megadit"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    reader = MediaReader(MediaLimits())
    try:
        assert reader.num_pixels(GIF)
    finally:
        reader.close()
    run_module("megadit.models.shared.cli.verbs", "--help")
    assert not (tmp_path / "ran").exists()
    subprocess.run([sys.executable, "-m", "json.tool", "--help"], capture_output=True)
    assert (tmp_path / "ran").exists(), "as it is without this"
    root = Path(megadit.models.__path__[0]).parent
    product = [file for name in ("export", "infer", "models", "serve", "train") for file in (root / name).rglob("*.py")]
    starts = {str(file.relative_to(root)) for file in product if "sys.executable" in file.read_text()}
    assert starts == {"models/shared/cli/command.py", "train/slurm/scripts.py"}
