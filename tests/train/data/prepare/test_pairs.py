"""`megadit prepare edits` and `preferences`: pairs of clips and their texts become samples."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

from megadit.infer.media.video_io import write_video
from megadit.models.text_encoders import HashedWordEncoder
from megadit.models.tokenizers import HaarTokenizer
from megadit.train.data.packs.samples import OCCURRENCE, decode
from megadit.train.data.prepare.command import main
from megadit.train.data.prepare.pairs import KINDS, list_pairs


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoders")
    HaarTokenizer(temporal_compression=4, spatial_compression=8, sigma_data=1.0).save(folder / "tokenizer")
    HashedWordEncoder(dim=16).save(folder / "text_encoder")
    return ["--tokenizer", str(folder / "tokenizer"), "--text_encoder", str(folder / "text_encoder")]


def picture(path, shade, size=(20, 30)):
    Image.fromarray(np.full((*size, 3), shade, np.uint8)).save(path)


def table(folder, rows, columns=("before", "after", "instruction")):
    with open(folder / "pairs.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return folder / "pairs.csv"


def samples(out, split="train"):
    """Key -> the sample as training reads it."""
    import tarfile

    crude: dict[str, dict] = {}
    for path in sorted(out.glob(f"{split}-*.tar")):
        with tarfile.open(path) as shard:
            for member in shard:
                key, _, suffix = member.name.partition(".")
                crude.setdefault(key, {"__key__": key, OCCURRENCE: 0})[suffix] = shard.extractfile(member).read()
    return {key: decode(members) for key, members in crude.items()}


def prepared(source, out, encoders, *more, kind="edits"):
    return main([kind, str(source), str(out), *encoders, "--size", "16", "24", "--val_share", "0", *more])


def test_images_of_a_table(tmp_path, encoders):
    for number in range(3):
        picture(tmp_path / f"{number}a.png", 40 * number)
        picture(tmp_path / f"{number}b.png", 255 - 40 * number)
    source = table(
        tmp_path, [(f"{n}a.png", f"{n}b.png", f"make it {n}") for n in range(3)], ("input", "output", "edit")
    )
    assert prepared(source, tmp_path / "out", encoders) == 0
    found = samples(tmp_path / "out")
    assert len(found) == 3
    for sample in found.values():
        assert sample.fps == 0 and sample.latent_CTHW.shape == sample.reference_CTHW.shape == (768, 1, 2, 3)
        assert len(sample.text_LE) == 3
    # the source is dark where the result is light: their first principal values have opposite signs
    means = [(s.reference_CTHW.float()[0].mean(), s.latent_CTHW.float()[0].mean()) for s in found.values()]
    assert all(before < after for before, after in means)


def test_videos_are_cut_alike(tmp_path, encoders):
    frames = np.zeros((14, 16, 24, 3), np.uint8)
    write_video(tmp_path / "a.mp4", frames, 8)
    write_video(tmp_path / "b.mp4", frames[:11] + 200, 8)
    source = table(tmp_path, [("a.mp4", "b.mp4", "brighter")])
    assert prepared(source, tmp_path / "out", encoders, "--fps", "8", "--num_frames", "13") == 0
    (sample,) = samples(tmp_path / "out").values()
    assert sample.latent_CTHW.shape[1] == sample.reference_CTHW.shape[1] == 3, "9 of 11 frames can be encoded"
    assert sample.fps == 8


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        (("rejected", "chosen", "prompt"), ("dark.png", "light.png", "a light")),
        (("video_a", "video_b", "choice", "caption"), ("dark.png", "light.png", "B", "a light")),
        (("video_a", "video_b", "choice", "caption"), ("light.png", "dark.png", "video_a", "a light")),
    ],
)
def test_preferences_are_a_chosen_and_a_rejected_video(tmp_path, encoders, columns, row, capsys):
    picture(tmp_path / "dark.png", 10)
    picture(tmp_path / "light.png", 240)
    assert prepared(table(tmp_path, [row], columns), tmp_path / "out", encoders, kind="preferences") == 0
    assert "train.distill.objective=dpo" in capsys.readouterr().out
    (sample,) = samples(tmp_path / "out").values()
    chosen, rejected = sample.videos
    assert (chosen.preference, rejected.preference) == (1, -1) and chosen.rejected_CTHW is None
    assert chosen.latent_CTHW.float()[0].mean() > rejected.latent_CTHW.float()[0].mean()
    assert chosen.sample_id == rejected.sample_id and len(chosen.text_LE) == 2


def test_instruct_pix2pix_as_published(tmp_path, encoders, capsys):
    for name, seeds in (("0001", (7, 8)), ("0002", (9,))):
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        (folder / "prompt.json").write_text(json.dumps({"input": "a cat", "edit": f"edit {name}", "output": "a dog"}))
        for seed in seeds:
            picture(folder / f"{seed}_0.jpg", 10)
            picture(folder / f"{seed}_1.jpg", 200)
    picture(tmp_path / "data" / "0002" / "10_0.jpg", 10)  # its counterpart is missing
    (tmp_path / "data" / "0001" / "8_1.jpg").write_bytes(b"no picture")
    assert len(list(list_pairs(tmp_path / "data", KINDS["edits"]))) == 3
    assert prepared(tmp_path / "data", tmp_path / "out", encoders) == 0
    assert "left out 1 pairs: broken" in capsys.readouterr().out
    info = json.loads((tmp_path / "out" / "megadit.json").read_text())
    assert len(samples(tmp_path / "out")) == 2 and info["num_samples"] == {"train": 2, "val": 0}


def test_pairs_in_which_nothing_was_edited_are_counted_and_left_out(tmp_path, encoders, capsys):
    picture(tmp_path / "a.png", 0)
    picture(tmp_path / "b.png", 99)
    write_video(tmp_path / "c.mp4", np.zeros((9, 16, 24, 3), np.uint8), 8)
    rows = [("a.png", "b.png", "lighter"), ("a.png", "a.png", "lighter"), ("c.mp4", "c.mp4", "lighter")]
    assert prepared(table(tmp_path, rows), tmp_path / "out", encoders) == 0
    assert "left out 2 pairs: nothing was edited" in capsys.readouterr().out
    assert len(samples(tmp_path / "out")) == 1


def test_a_second_run_goes_on_and_another_is_refused(tmp_path, encoders, capsys):
    picture(tmp_path / "a.png", 0)
    picture(tmp_path / "b.png", 99)
    source = table(tmp_path, [("a.png", "b.png", "lighter")])
    assert prepared(source, tmp_path / "out", encoders) == 0
    shard = next((tmp_path / "out").glob("train-*.tar"))
    first = shard.read_bytes()
    shard.unlink()
    (tmp_path / "out" / "megadit.json").unlink()
    assert prepared(source, tmp_path / "out", encoders) == 0
    assert shard.read_bytes() == first
    assert prepared(source, tmp_path / "out", encoders, "--num_frames", "5") == 2
    assert "holds samples of another request" in capsys.readouterr().err
    assert prepared(source, tmp_path / "out", encoders, "--num_frames", "5", "--overwrite") == 0


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ([("a.png", "b.png", "x")], ("before", "later", "instruction"), "has no after: name the column one of after"),
        ([("../a.png", "b.png", "x")], ("before", "after", "instruction"), ".."),
        ([], ("before", "after", "instruction"), "holds no pair"),
    ],
)
def test_mistakes_of_edits(tmp_path, encoders, capsys, rows, columns, message):
    folder = tmp_path / "inside"
    folder.mkdir()
    for name in ("a.png", "b.png"):
        picture(folder / name, 0)
        picture(tmp_path / name, 0)
    assert prepared(table(folder, rows, columns), tmp_path / "out", encoders) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        (("a.png", "b.png", "c", "x"), ("video_a", "video_b", "choice", "prompt"), "choice='c' is neither a nor b"),
        (("a.png", "b.png", "x"), ("video_a", "video_b", "prompt"), "choice=None is neither a nor b"),
        (("a.png", "b.png", "x"), ("before", "chosen", "prompt"), "row 1 of"),
    ],
)
def test_mistakes_of_preferences(tmp_path, encoders, row, columns, message, capsys):
    source = table(tmp_path, [row], columns)
    assert prepared(source, tmp_path / "out", encoders, kind="preferences") == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert prepared(tmp_path, tmp_path / "out", encoders, kind="preferences") == 2
    assert "give a table of pairs\n" in capsys.readouterr().err


def test_a_network_can_train_on_it(tmp_path, encoders):
    from dataclasses import replace

    from megadit.train.data.packs.packed_batch import PackFormat
    from megadit.train.recipes import load_recipe

    picture(tmp_path / "a.png", 0)
    picture(tmp_path / "b.png", 99)
    prepared(table(tmp_path, [("a.png", "b.png", "lighter")]), tmp_path / "out", encoders)
    (sample,) = samples(tmp_path / "out").values()
    sample.latent_CTHW, sample.reference_CTHW = sample.latent_CTHW[:4], sample.reference_CTHW[:4]
    model = replace(load_recipe("digits_tiny").model, in_channels=4, crossattn_emb_size=16, conditioning_sigma=0.02)
    pack = PackFormat(
        model=model, seq_length=24, text_seq_length=8, seed=0, text_dropout=0.0, conditioning=(("edit", 1.0),)
    ).pack([sample])
    assert pack.layout.segments[0].clean == ((6, 12),) and pack.num_tokens == 6
    assert torch.equal(pack.tokens_S1P[6:12, 0].float(), sample.reference_CTHW.float().flatten(1).T)
