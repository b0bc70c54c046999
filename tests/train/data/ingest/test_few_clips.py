"""Of a subject there are few clips: one caption for all of them, and each of training once more in a mirror."""

import json
import tarfile

import pytest
import safetensors.torch
import torch

from megadit.train.data.prepare import command as prepare

NUM_CLIPS = 4


@pytest.fixture
def clips(tmp_path, make_clip, make_pan):
    """A folder of clips, one of them captioned."""
    folder = tmp_path / "clips"
    folder.mkdir()
    for number in range(NUM_CLIPS):
        make_clip(folder / f"{number}.mp4", make_pan("flower.jpg", 9, 64, 64, start=(60 * number, 90 * number)))
    (folder / "0.txt").write_text("a flower")
    return folder


@pytest.fixture
def run(clips, tmp_path):
    def run(*options, code=0):
        """What is known of the samples of each split, and their latents."""
        out = tmp_path / "data"
        sizes = ("--height", "64", "--width", "64", "--num_frames", "9", "--tokenizer", "pixels")
        command = ["videos", str(clips), str(out), *sizes, "--num_workers", "0", "--val_share", "0.25", *options]
        assert prepare.main(command) == code
        return {split: list(read(out, split)) for split in ("train", "val")} if code == 0 else out

    return run


def read(root, split):
    for path in sorted(root.glob(f"{split}-*.tar")):
        with tarfile.open(path) as tar:
            contents = {member.name: tar.extractfile(member).read() for member in tar}
        for name in contents:
            if name.endswith(".json"):
                tensors = safetensors.torch.load(contents[name.replace(".json", ".safetensors")])
                yield json.loads(contents[name]), tensors["latent"]


def test_clips_of_training_stand_beside_their_mirror_images(run, tmp_path):
    """Of which no originals are kept."""
    splits = run("--mirror", "--source_media")
    own = {known["source"]: latent for known, latent in splits["train"] if "mirrored" not in known}
    mirrored = {known["source"]: latent for known, latent in splits["train"] if "mirrored" in known}
    assert len(own) == len(mirrored) == NUM_CLIPS - 1 and len(splits["val"]) == 1
    for source, latent_CTHW in own.items():
        assert torch.equal(mirrored[source], latent_CTHW.flip(-1))
        assert not torch.equal(mirrored[source], latent_CTHW)
    assert not any("mirrored" in known for known, _ in splits["val"])
    with tarfile.open(tmp_path / "data" / "source_media" / "train-000000.tar") as tar:
        names = {name.split(".")[0] for name in tar.getnames()}
    assert len(names) == NUM_CLIPS - 1 and not any("mirrored" in name for name in names)


def test_one_caption_for_all_that_have_none(run):
    """And no mirror image, which nobody asked for."""
    splits = run("--default_caption", "a zog")
    assert [len(samples) for samples in splits.values()] == [NUM_CLIPS - 1, 1]
    captions = sorted(known["caption"] for split in splits.values() for known, _ in split)
    assert captions == ["a flower", *["a zog"] * (NUM_CLIPS - 1)]


def test_a_caption_for_all_beside_a_server_is_refused(run, capsys):
    server = ("--caption_server", "http://127.0.0.1:1", "--caption_model", "m")
    out = run("--default_caption", "a zog", *server, code=2)
    assert "give one of them" in capsys.readouterr().err and not out.exists()
