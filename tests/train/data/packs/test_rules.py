"""What the `data.*` rules do to single samples, seen in the packs that come out of the loader."""

import logging
import os
import pickle
from collections import Counter
from itertools import islice

import pytest
import torch

from megadit.models.shared.errors import UserError
from megadit.train.data.loader import build_train_loader, build_validation_loader
from megadit.train.data.packs.packed_batch import REFUSALS
from megadit.train.data.writer import prepare_for_energon, sample_members, write_members


class Trap:
    """A pickle that would leave a file behind."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def first_samples(config, count: int = 300) -> Counter[str]:
    names: Counter[str] = Counter()
    for batch in build_train_loader(config, rank=0, world_size=1):
        names.update(name for name in batch.sample_ids if name)
        if names.total() >= count:
            return names


def test_max_frames_crops_before_lengths_are_measured(make_config):
    config = make_config(max_frames=2, text_dropout=0.0)
    for batch in islice(build_train_loader(config, rank=0, world_size=1), 10):
        for name, segment, length in zip(batch.sample_ids, batch.layout.segments, batch.layout.lengths, strict=True):
            if name:
                is_clip = int(name[-5:]) % 2 == 1
                assert segment.grid[0] == (2 if is_clip else 1) and length == segment.grid[0] * 16


def test_samples_that_were_too_long_fit_after_the_crop(make_config, new_writer, toy):
    with new_writer() as writer:
        toy.add_sample(writer, "train", 0)
        toy.add_sample(writer, "train", 1, latent_CTHW=torch.zeros(toy.channels, 40, 4, 4))
    assert set(first_samples(make_config(path=str(writer.root)), 20)) == {"train-00000"}
    assert set(first_samples(make_config(path=str(writer.root), max_frames=3), 20)) == {"train-00000", "train-00001"}


def test_large_latents_are_skipped_and_counted(make_config, new_writer, toy, caplog):
    with new_writer() as writer:
        for index in range(5):
            toy.add_sample(writer, "train", index)
        toy.add_sample(writer, "train", 5, latent_CTHW=torch.full((toy.channels, 1, 4, 4), -2000.0))
    with caplog.at_level(logging.WARNING):
        assert "train-00005" not in first_samples(make_config(path=str(writer.root)), 40)
    assert "train-00005: its latent exceeds data.max_latent, 1000" in " / ".join(caplog.messages)
    assert "train-00005" in first_samples(make_config(path=str(writer.root), max_latent=2000.0), 40)


def test_a_least_aesthetic_score_skips_those_without_one(make_config, caplog):
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(UserError, match="aesthetic score is below data.min_aesthetic_score, 4.5"),
    ):
        first_samples(make_config(min_aesthetic_score=4.5))


def test_shares_mix_images_and_clips_by_ratio(make_config, toy):
    names = first_samples(make_config(keep=("image:0.25",)), 1200)
    images = sum(count for name, count in names.items() if int(name[-5:]) % 2 == 0)
    assert images / names.total() == pytest.approx(0.25 / 1.25, abs=0.04)
    # other images in other passes: nearly all have their turn
    assert len([name for name in names if int(name[-5:]) % 2 == 0]) > 0.6 * toy.num_train / 2


def test_shares_go_by_bucket_too_and_leave_validation_alone(make_config):
    thinned, whole = first_samples(make_config(keep=("32x32:0.1", "video:0.5")), 40), first_samples(make_config(), 40)
    assert thinned != whole
    config = make_config(keep=("32x32:0.1",))
    expected = [batch.sample_ids for batch in build_validation_loader(make_config(), rank=0, world_size=1)]
    assert [batch.sample_ids for batch in build_validation_loader(config, rank=0, world_size=1)] == expected


def test_hostile_members_are_counted_and_do_not_end_the_training(make_config, new_writer, toy, tmp_path, caplog):
    """Headers of 4 bytes and of 10 GB, foreign keys, a pickle, wrong types, an empty shard."""
    with new_writer(splits=("train",)) as writer:
        for index in range(20):
            toy.add_sample(writer, "train", index)
    good = sample_members("unknown", {"caption": "", "fps": 8}, {"other": torch.zeros(3)})
    described = b'{"caption": "", "fps": 8}'
    bad = {
        "four": [("four.json", described), ("four.safetensors", b"\x01\x02\x03\x04")],
        "huge": [("huge.json", described), ("huge.safetensors", (10 << 30).to_bytes(8, "little") + b"{}")],
        "unknown": good,
        "nan": sample_members("nan", {"fps": 8}, {"latent": torch.full((toy.channels, 1, 4, 4), torch.nan)}),
        "pickled": [("pickled.json", described), ("pickled.pth", pickle.dumps(Trap(tmp_path / "trapped")))],
        "typed": sample_members("typed", {"fps": [1]}, {"latent": torch.zeros(toy.channels, 1, 4, 4)}),
        "listed": [("listed.json", b"[1, 2]"), ("listed.safetensors", good[1][1])],
        "alone": [("alone.json", described)],
    }
    write_members(writer.root / "train-000001.tar", [member for members in bad.values() for member in members])
    write_members(writer.root / "train-000002.tar", [])
    prepare_for_energon(writer.root, ["train"])
    with caplog.at_level(logging.WARNING):
        batches = list(islice(build_train_loader(make_config(path=str(writer.root)), rank=0, world_size=1), 40))
    names = {name for batch in batches for name in batch.sample_ids if name}
    assert names == {f"train-{index:05d}" for index in range(20)}
    counts = map(sum, zip(*(batch.refused for batch in batches), strict=True))
    refused = Counter(dict(zip(REFUSALS, counts, strict=True)))
    num_passes = refused["not_finite"]  # of one sample
    assert num_passes >= 2 and 7 * (num_passes - 1) < refused["unreadable"] <= 7 * (num_passes + 1)
    assert refused.total() == refused["not_finite"] + refused["unreadable"]
    messages = " / ".join(caplog.messages)
    assert "sample nan: it holds NaN" in messages  # seven others are unreadable: the log names the 1st, 10th, ...
    assert "unreadable" in messages and "(1 so far)" in messages and "(10 so far)" in messages
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("share", ["image", "image:0", "image:2", "imag:0.5", "32:0.5", "x:0.5"])
def test_malformed_shares_are_told(make_config, share):
    with pytest.raises(UserError, match="data.keep: "):
        build_train_loader(make_config(keep=(share,)), rank=0, world_size=1)
