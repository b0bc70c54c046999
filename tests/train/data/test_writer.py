"""Data sets on disk: complete or absent, and accepted by Energon without us."""

import json
import tarfile
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_train_dataset,
    stateless,
)

from megadit.models.shared.errors import UserError
from megadit.train.dataset import dataset_info
from megadit.train.dataset.dataset_info import DatasetInfo, draw_captions, iter_captions


@edataclass
class PlainSample(Sample):
    members: dict[str, Any]


@stateless
def cook_plain(crude: dict) -> PlainSample:
    return PlainSample(
        **basic_sample_keys(crude), members={name: value for name, value in crude.items() if name[:2] != "__"}
    )


class PlainTaskEncoder(DefaultTaskEncoder):
    """The shortest task encoder that Energon's manual shows."""

    decoder = None
    cookers = [Cooker(cook_plain)]


def test_energon_reads_the_folder_without_our_code(dataset, toy):
    energon_dataset = get_train_dataset(
        dataset,
        dataset_config="crude.yaml",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=PlainTaskEncoder(),
        repeat=False,
    )
    samples = {sample.__key__: sample.members for sample in get_loader(energon_dataset)}
    assert sorted(samples) == [f"train-{index:05d}" for index in range(toy.num_train)]
    members = samples["train-00017"]
    assert set(members) == {"json", "safetensors"}
    assert all(isinstance(value, bytes) for value in members.values())
    tensors = safetensors.torch.load(members["safetensors"])
    torch.testing.assert_close(tensors["latent"], toy.latent_of(17))
    torch.testing.assert_close(tensors["text"], toy.text_of(17))
    assert json.loads(members["json"]) == {
        "caption": "sample 17", "num_frames": 9, "height": 32, "width": 32, "fps": 8.0,
    }  # fmt: skip


def test_info_is_read_back(dataset, toy):
    info = DatasetInfo.read(dataset)
    assert info.num_samples == {"train": toy.num_train, "val": toy.num_val}
    assert (info.latent_channels, info.text_width, info.sigma_data) == (toy.channels, toy.text_width, 1.0)
    assert (info.tokenizer_fingerprint, info.text_encoder_fingerprint) == ("tokenizer-stub", "text-encoder-stub")
    assert (info.tokenizer_folder / "config.json").is_file()
    assert (info.text_encoder_folder / "config.json").is_file()


def test_shards_hold_at_most_shard_size_samples(dataset, toy):
    shards = sorted(path.name for path in dataset.glob("train-*.tar"))
    assert shards == [f"train-{index:06d}.tar" for index in range(5)]
    with tarfile.open(dataset / shards[-1]) as shard:
        assert len(shard.getnames()) == 2 * (toy.num_train - 4 * 50)


def test_equal_data_give_equal_shards(new_writer, toy, tmp_path):
    for name in ("one", "two"):
        with new_writer(tmp_path / name) as writer:
            toy.add_sample(writer, "train", 1)
    first, second = ((tmp_path / name / "train-000000.tar").read_bytes() for name in ("one", "two"))
    assert first == second


def test_captions_in_order(dataset):
    captions = iter_captions(dataset, "val")
    assert [next(captions), next(captions)] == ["sample 0", "sample 1"]


def test_captions_are_drawn_from_few_shards(dataset, toy, monkeypatch):
    """Of five shards of 48 samples those are opened that hold what is wanted."""
    everything, opened, read = set(iter_captions(dataset, "train")), [], dataset_info._descriptions_of
    monkeypatch.setattr(dataset_info, "_descriptions_of", lambda shard: opened.append(shard.name) or read(shard))
    drawn = draw_captions(dataset, "train", 60)
    assert len(set(drawn)) == 60 and set(drawn) < everything and len(opened) == 2
    assert drawn == draw_captions(dataset, "train", 60) and opened[:2] != ["train-000000.tar", "train-000001.tar"]
    assert set(draw_captions(dataset, "train", 1000)) == everything and len(everything) == toy.num_train


def test_captions_that_repeat_end_the_search(dataset, monkeypatch):
    looked_at = []
    monkeypatch.setattr(
        dataset_info, "read_description", lambda data: looked_at.append(data) or SimpleNamespace(caption="a")
    )
    assert draw_captions(dataset, "train", 2) == ["a"] and len(looked_at) == 200


def test_nothing_appears_after_an_error(new_writer, toy, tmp_path):
    with pytest.raises(RuntimeError, match="power cut"), new_writer() as writer:
        toy.add_sample(writer, "train", 1)
        raise RuntimeError("power cut")
    assert list(tmp_path.iterdir()) == []


def test_nothing_appears_if_the_last_files_fail(new_writer, toy, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "megadit.train.data.writer.prepare_for_energon", lambda *_: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError, match="disk full"), new_writer() as writer:
        toy.add_sample(writer, "train", 1)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_not_there_before_it_is_complete(new_writer, toy, tmp_path):
    with new_writer() as writer:
        toy.add_sample(writer, "train", 1)
        assert not (tmp_path / "dataset").exists()
    assert (tmp_path / "dataset" / ".nv-meta" / "dataset.yaml").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent_CTHW": torch.zeros(5, 1, 4, 4)}, r"expected float16 or float32 \[4, T, H, W\]"),
        ({"latent_CTHW": torch.zeros(4, 1, 4, 4, dtype=torch.bfloat16)}, "bfloat16"),
        ({"latent_CTHW": torch.full((4, 1, 4, 4), torch.nan)}, "NaN"),
        ({"text_LE": torch.zeros(3, 7)}, r"expected \[L, 8\]"),
        ({"latent_CTHW": torch.zeros(4, 1, 4, 4).half(), "text_LE": torch.full((3, 8), 7e4)}, "torch.float16"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(new_writer, toy, changes, message):
    with pytest.raises(UserError, match=message), new_writer() as writer:
        toy.add_sample(writer, "train", 1, **changes)


def test_keys_are_unique_over_all_splits(new_writer, toy):
    with pytest.raises(UserError, match="used twice"), new_writer() as writer:
        fields = dict(latent_CTHW=toy.latent_of(0), text_LE=toy.text_of(0), caption="", num_frames=1)
        for split in ("train", "val"):
            writer.add(split, "same", **fields, height=32, width=32, fps=0.0)


def test_an_unknown_split_is_refused(new_writer, toy):
    with pytest.raises(UserError, match="unknown split 'tset'"), new_writer() as writer:
        toy.add_sample(writer, "tset", 1)


def test_a_data_set_needs_training_samples(new_writer, toy):
    with pytest.raises(UserError, match="no sample was written"), new_writer() as writer:
        toy.add_sample(writer, "val", 1)


def test_a_folder_that_was_not_prepared_names_the_command(tmp_path):
    with pytest.raises(UserError, match="megadit prepare"):
        DatasetInfo.read(tmp_path / "missing")
    with pytest.raises(UserError, match="megadit prepare"):
        DatasetInfo.read(tmp_path)


def test_a_newer_format_is_refused(new_writer, toy, tmp_path):
    with new_writer() as writer:
        toy.add_sample(writer, "train", 1)
    path = tmp_path / "dataset" / "megadit.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(UserError, match="format_version 2"):
        DatasetInfo.read(tmp_path / "dataset")
