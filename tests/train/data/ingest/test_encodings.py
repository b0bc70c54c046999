"""Encodings declared in a file: their names, precision and padding reach the shards."""

import tarfile

import pytest
import safetensors.torch
import torch

from megadit.models.shared.errors import UserError
from megadit.train.data import prepare
from megadit.train.data.ingest.encodings import read_encodings

GOOD = """
- {name: latent, modality: video, encoder: haar, precision: float32}
- {name: text, modality: text, encoder: hashed_words}
- {name: text_short, modality: text, encoder: hashed_words, precision: float32, padding: 4}
"""


def test_all_encodings_of_the_file_are_stored(tmp_path, make_clip, make_pan):
    source = tmp_path / "videos"
    source.mkdir()
    for number, name in enumerate(("china.jpg", "flower.jpg", "flower.jpg")):
        path = make_clip(source / f"{number}.mp4", make_pan(name, 9, 96, 96, start=(90 * number + 60, 200)))
        path.with_suffix(".txt").write_text("one two three four five six"[: 14 * number])
    (tmp_path / "encodings.yaml").write_text(GOOD)
    options = ["--height", "64", "--width", "64", "--num_frames", "9", "--num_workers", "0", "--channels", "8"]
    options += ["--val_share", "0", "--encodings", str(tmp_path / "encodings.yaml"), "--debug"]
    assert prepare.main(["videos", str(source), str(tmp_path / "out"), *options]) == 0
    with tarfile.open(tmp_path / "out" / "train-000000.tar") as tar:
        samples = [
            safetensors.torch.load(tar.extractfile(member).read()) for member in tar if member.name.endswith("tensors")
        ]
    assert {len(tensors.get("text", ())) for tensors in samples} == {0, 3, 6}
    for tensors in samples:
        assert tensors["latent"].dtype == torch.float32 and tensors["latent"].shape == (8, 3, 8, 8)
        assert ("text" in tensors) == ("text_short" in tensors)  # an empty text has no features, padded or not
        if "text" not in tensors:
            continue
        short = tensors["text_short"]
        assert short.shape == (4, 64) and short.dtype == torch.float32
        assert int(short.abs().amax(1).count_nonzero()) == min(4, len(tensors["text"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("precision: float32}", "precision: int4}"), "precision='int4' must be float16 or float32"),
        (("padding: 4", "paddign: 4"), "unknown key 'paddign'; did you mean 'padding'"),
        (("name: text_short", "name: text"), "uses a name twice"),
        (("name: latent", "name: video"), "no video encoding named 'latent'"),
        (("modality: video", "modality: sound"), "modality='sound' must be video or text"),
        ((", encoder: haar", ""), "an encoding lacks encoder"),
        (("- {", "* {"), "cannot be read"),
    ],
)
def test_mistakes_in_the_file_are_told(tmp_path, change, message):
    path = tmp_path / "encodings.yaml"
    path.write_text(GOOD.replace(*change))
    with pytest.raises(UserError, match=message):
        read_encodings(path)
