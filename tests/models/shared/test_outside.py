"""Links in a folder that somebody else filled are not followed out of it, whichever command reads the folder."""

import os

import numpy as np
import pytest

from megadit.infer.evaluate.videos import open_videos
from megadit.infer.pictures import picture_files
from megadit.infer.video_io import write_video
from megadit.models.shared.errors import UserError
from megadit.models.shared.outside import files_under, leads_out, walk


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
