"""Encodings declared in a file: their names, precision and padding reach the shards."""

import tarfile
from dataclasses import replace
from itertools import islice

import imageio.v3 as iio
import numpy as np
import pytest
import safetensors.torch
import torch

from megadit.models.shared.errors import UserError
from megadit.models.text_encoders import load_text_encoder
from megadit.train.data.ingest.clips.encodings import gather_labels, read_encodings
from megadit.train.data.loader import build_train_loader
from megadit.train.data.prepare import command as prepare
from megadit.train.recipes import load_recipe

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


@pytest.mark.parametrize("store", ["latents", "raw"])
def test_folders_of_classes_become_pixels_and_labels(tmp_path, store):
    pixels = {}
    for name, colour in (("red_fox", (200, 30, 10)), ("owl", (90, 90, 90)), ("Bee", (250, 220, 0))):
        (tmp_path / "in" / name).mkdir(parents=True)
        grain = np.random.default_rng(len(name)).integers(0, 30, (8, 8, 3))
        pixels[name.lower().replace("_", " ")] = picture = np.clip(np.array(colour) + grain, 0, 255).astype(np.uint8)
        iio.imwrite(tmp_path / "in" / name / "0.png", picture)
    options = ["--captions", "folders", "--tokenizer", "pixels", "--text_encoder", "labels", "--sizes", "8x8"]
    options += ["--val_share", "0", "--num_workers", "0", "--store", store]
    assert prepare.main(["images", str(tmp_path / "in"), str(tmp_path / "out"), *options]) == 0
    labels = load_text_encoder(tmp_path / "out" / "text_encoder")
    assert labels.names == ("bee", "owl", "red fox")
    loader, seen = iter(build_train_loader(run_of(tmp_path / "out", store), rank=0, world_size=1)), {}
    for batch in islice(loader, 20):  # packs of one picture, read again and again
        seen[labels.names[int(batch.text_L1E[0, 0, 1])]] = batch.tokens_S1P[1:, 0]
    assert seen.keys() == pixels.keys()
    for name, tokens_SP in seen.items():
        image_HWC = tokens_SP.reshape(2, 2, 4, 4, 3).permute(0, 2, 1, 3, 4).reshape(8, 8, 3)
        # float16, of 8 bits in [-1, 1]
        torch.testing.assert_close(image_HWC, torch.from_numpy(pixels[name]) / 127.5 - 1, rtol=0, atol=1e-3)


def run_of(path, store):
    run = load_recipe("vit_digits")
    model = replace(run.model, learned_positions=(1, 2, 2), num_classes=3)
    encode = "on_the_fly" if store == "raw" else "precached"
    data = replace(run.data, path=str(path), encode=encode, seq_length=5, text_seq_length=1)
    data = replace(data, packing_buffer_size=3, shuffle_buffer_size=3)
    return replace(run, model=model, data=data)


def test_a_picture_without_a_label_is_refused():
    with pytest.raises(UserError, match="a picture without a label has no class"):
        gather_labels(["owl", " "])


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
