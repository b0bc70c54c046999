"""`megadit prepare digits`: what the shards hold is what their captions say."""

import json
import shutil
import tarfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from megadit.infer.evaluate.extractors.digits import centres_of_mass, strokes
from megadit.infer.media.video_io import write_video
from megadit.models.shared.errors import UserError
from megadit.models.text_encoders import load_text_encoder
from megadit.models.tokenizers import load_tokenizer
from megadit.train.data.prepare import command as prepare
from megadit.train.data.prepare import drawn
from megadit.train.dataset.dataset_info import DatasetInfo
from megadit.train.demos.digits import classifier
from megadit.train.demos.digits import data as digits
from megadit.train.demos.digits.samples import DIGITS


def read_samples(root, split: str) -> list[tuple[str, dict, dict]]:
    samples = []
    for shard in sorted(root.glob(f"{split}-*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar.getmembers():
                key, _, kind = member.name.rpartition(".")
                if kind == "json":
                    description = json.load(tar.extractfile(member))
                else:
                    tensors = safetensors.torch.load(tar.extractfile(member).read())
                    samples.append((key, description, tensors))
    return samples


SIZES = ("--num_clips", "30", "--num_images", "60", "--num_val", "20")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("digits") / "dataset"
    assert prepare.main(["digits", str(root), *SIZES]) == 0
    return root


@pytest.fixture(scope="module")
def forty(tmp_path_factory):
    """forty(source): the data set with as many samples to train on, made once."""

    @cache
    def forty(source: str) -> Path:
        out = tmp_path_factory.mktemp(source) / source
        assert prepare.main([source, str(out), "--num_images", "40"]) == 0
        return out

    return forty


def test_counts(prepared):
    info = DatasetInfo.read(prepared)
    assert info.num_samples == {"train": 90, "val": 20}
    frames = [description["num_frames"] for _, description, _ in read_samples(prepared, "train")]
    assert sorted(frames) == [1] * 60 + [digits.NUM_FRAMES] * 30
    assert info.sigma_data == 1 and info.latent_channels == DIGITS.channels


def test_labelled_digits(forty):
    out = forty("digit_classes")
    info, labels = DatasetInfo.read(out), load_text_encoder(out / "text_encoder")
    assert info.num_samples == {"train": 40, "val": 355} and labels.names == digits.DIGITS
    for _, description, tensors in read_samples(out, "train"):
        (digits_E,) = tensors["text"]
        assert tensors["latent"].shape == (3, 1, digits.FRAME_SIZE, digits.FRAME_SIZE)
        assert labels.names[int(digits_E[1])] == description["caption"]
    held_out = [description["caption"] for _, description, _ in read_samples(out, "val")]
    counts = digits.load_glyphs("heldout").digit_B.bincount().tolist()
    assert [held_out.count(name) for name in digits.DIGITS] == counts


def test_captioned_digits(forty):
    """Tokens are those of their captions, all of whose words have been learned."""
    out = forty("digit_captions")
    words = load_text_encoder(out / "text_encoder")
    assert DatasetInfo.read(out).num_samples == {"train": 40, "val": 600} and words.num_words <= 512
    for _, description, tensors in read_samples(out, "train"):
        found = words.encode([description["caption"]])
        assert torch.equal(tensors["text"].float(), found.features_BLE[0]) and len(tensors["text"]) <= 12


def test_clips_labelled_by_what_they_show(forty):
    """By the demo's classifier, which measures colour and way; held out is each class at both speeds."""
    out = forty("digit_clips")
    labels = load_text_encoder(out / "text_encoder")
    assert DatasetInfo.read(out).num_samples == {"train": 40, "val": 480} and len(set(labels.names)) == 240
    samples = read_samples(out, "train")
    verdicts = classifier.classify(
        classifier.DigitReader().eval(), torch.stack([each["latent"].float() for _, _, each in samples])
    )
    for row, (_, description, tensors) in enumerate(samples):
        (digits_E,) = tensors["text"].long()
        assert labels.names[256 * digits_E[0] + digits_E[1]] == description["caption"] and description["fps"] == 8
        colour, _, direction = description["caption"].split()
        assert list(digits.COLOURS)[verdicts.colour_BT[row, 4]] == colour
        assert list(digits.DIRECTIONS)[verdicts.direction_B[row]] == direction
    held_out = read_samples(out, "val")
    ends_BCTHW = torch.stack([each["latent"].float()[:, [0, -1]] for _, _, each in held_out])
    centre_B22 = centres_of_mass(strokes(ends_BCTHW).flatten(0, 1)).reshape(-1, 2, 2)
    travelled = (centre_B22[:, 1] - centre_B22[:, 0]).norm(dim=1).tolist()
    pixels_of = {name: [] for name in labels.names}
    for (_, description, _), pixels in zip(held_out, travelled, strict=True):
        pixels_of[description["caption"]].append(pixels)
    assert all(sorted(pixels) == pytest.approx([8 * 0.6, 8 * 1.25], abs=1) for pixels in pixels_of.values())


@pytest.mark.parametrize("source", ["digit_classes", "digit_captions", "digit_clips", "digit_images"])
def test_digits_one_to_a_picture(forty, tmp_path, capsys, source):
    out, first = shutil.copytree(forty(source), tmp_path / "out"), read_samples(forty(source), "train")
    assert prepare.main([source, str(out), "--num_images", "40", "--overwrite", "--seed", "1"]) == 0
    other = read_samples(out, "train")
    assert any(not torch.equal(x["latent"], y["latent"]) for (_, _, x), (_, _, y) in zip(first, other, strict=True))
    assert prepare.main([source, str(out)]) == 0 and "already prepared" in capsys.readouterr().out
    assert prepare.main([source, str(tmp_path / "none"), "--num_images", "0"]) == 2


def test_digits_to_make_images_from_are_the_same_pictures_in_two_sizes(forty):
    """By one tokenizer, under one caption."""
    small, large = forty("digit_images"), forty("digit_images_64")
    tokenizer = load_tokenizer(small / "tokenizer")
    assert tokenizer.fingerprint() == load_tokenizer(large / "tokenizer").fingerprint()
    for (_, few, small_latent), (_, many, large_latent) in zip(
        read_samples(small, "train"), read_samples(large, "train"), strict=True
    ):
        assert few["caption"] == many["caption"] and (few["height"], many["height"]) == (32, 64)
        pictures = [tokenizer.decode(each["latent"][None].float())[0] for each in (small_latent, large_latent)]
        halved = torch.nn.functional.avg_pool3d(pictures[1], (1, 2, 2))
        assert (pictures[0] - halved).square().mean().sqrt() < 0.15


def test_decoded_clips_show_their_captions(prepared):
    tokenizer = load_tokenizer(prepared / "tokenizer")
    samples = [sample for sample in read_samples(prepared, "train") if sample[1]["num_frames"] > 1]
    clips = tokenizer.decode(torch.stack([tensors["latent"].float() for _, _, tensors in samples]))
    verdicts = classifier.classify(classifier.DigitReader().eval(), clips)
    for row, (_, description, tensors) in enumerate(samples):
        words = description["caption"].split()
        colour = list(digits.COLOURS)[verdicts.colour_BT[row].mode().values]
        direction = list(digits.DIRECTIONS)[verdicts.direction_B[row]]
        assert colour in words and (direction in words or f"{direction}wards" in words)
        assert tensors["text"].shape == (len(words), drawn.TEXT_WIDTH) and description["fps"] == digits.FPS


def test_validation_has_captions_and_combinations_of_its_own(prepared):
    trained = {description["caption"] for _, description, _ in read_samples(prepared, "train")}
    held_out = {description["caption"] for _, description, _ in read_samples(prepared, "val")}
    assert held_out and not trained & held_out
    assert all(digits._is_heldout(caption) for caption in held_out)


def test_a_second_run_does_nothing(prepared, capsys):
    before = (prepared / "train-000000.tar").stat().st_mtime_ns
    assert prepare.main(["digits", str(prepared)]) == 0
    assert "already prepared" in capsys.readouterr().out
    assert (prepared / "train-000000.tar").stat().st_mtime_ns == before


def test_the_seed_decides_the_files(prepared, tmp_path):
    prepare.main(["digits", str(tmp_path / "same"), *SIZES])
    prepare.main(["digits", str(tmp_path / "other"), *SIZES, "--seed", "1"])
    original = (prepared / "train-000000.tar").read_bytes()
    assert (tmp_path / "same" / "train-000000.tar").read_bytes() == original
    assert (tmp_path / "other" / "train-000000.tar").read_bytes() != original


def test_mistakes_are_told(tmp_path):
    with pytest.raises(UserError, match="did you mean 'digits'"):
        prepare.main(["digit", str(tmp_path), "--debug"])
    with pytest.raises(UserError, match="num_clips=0"):
        prepare.main(["digits", str(tmp_path / "a"), "--num_clips", "0", "--debug"])
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not a prepared data set"):
        prepare.main(["digits", str(tmp_path), "--overwrite", "--debug"])
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_finished_folder_is_replaced_on_demand(prepared, monkeypatch):
    replaced = []
    monkeypatch.setattr(drawn, "prepare_drawn", lambda drawn, out, **_: replaced.append(out))
    assert prepare.main(["digits", str(prepared)]) == 0 and not replaced
    assert prepare.main(["digits", str(prepared), "--overwrite"]) == 0 and replaced == [prepared]


@pytest.mark.parametrize("out", [".", ".."])
def test_the_folder_that_one_is_in_is_told_by_its_files(out, tmp_path, monkeypatch, capsys):
    """And has a lock beside it, though `.` has no name."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    write_video(tmp_path / "a" / "b" / "clip.mp4", np.zeros((5, 16, 16, 3), np.uint8), 8)
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert prepare.main(["videos", ".", out, "--sizes", "16x16", "--num_frames", "5"]) == 2
    assert "exists and is not a prepared data set" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "clip.mp4"]
