"""Training and validation readers over Energon: what a pass holds, what a resume repeats, what ranks share."""

import gc
import io
import json
import logging
import os
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
import torch

from megadit.models.diffusion.noise import sample_key
from megadit.models.shared.errors import UserError
from megadit.train.data.loader import (
    build_train_loader,
    build_validation_loader,
    check_dataset,
    validation_captions,
)
from megadit.train.data.packs.packed_batch import PackedBatch


def names_and_keys(batch: PackedBatch) -> list[tuple[str, int]]:
    """(sample id, noise key) of each sample, padding left out."""
    return [(name, key) for name, key in zip(batch.sample_ids, batch.noise_key_G.tolist(), strict=True) if name]


def assert_same(batch: PackedBatch, expected: PackedBatch) -> None:
    assert batch.sample_ids == expected.sample_ids
    assert batch.layout.segments == expected.layout.segments
    for name in ("tokens_S1P", "text_L1E", "fps_G", "noise_key_G"):
        torch.testing.assert_close(getattr(batch, name), getattr(expected, name), rtol=0, atol=0)


def read_samples(loader, count: int) -> list[tuple[str, int]]:
    """The first `count` samples or a few more."""
    samples: list[tuple[str, int]] = []
    for batch in loader:
        samples += names_and_keys(batch)
        if len(samples) >= count:
            return samples


# --- one pass after another ---------------------------------------------------------------------------------------


def test_each_pass_reads_every_sample_once_with_a_key_of_its_own(make_config, toy):
    config = make_config()
    names = [f"train-{index:05d}" for index in range(toy.num_train)]
    passes = {sample_key(config.train.seed, name, number): (name, number) for name in names for number in range(9)}
    seen = Counter(passes[key] for _, key in read_samples(build_train_loader(config, rank=0, world_size=1), 3 * 240))
    assert set(seen.values()) == {1}, "a (sample, occurrence) came twice"
    # buffers delay samples: the last ones of a pass come during the next, but none is lost
    for number in range(2):
        assert {name for name, occurrence in seen if occurrence == number} == set(names)


def test_packs_hold_what_is_on_disk(make_config, toy):
    config = make_config(text_dropout=0.0)
    for batch in islice(build_train_loader(config, rank=0, world_size=1), 5):
        layout = batch.layout
        for position, name in enumerate(batch.sample_ids):
            start, length = layout.starts[position], layout.lengths[position]
            text_start, slots = layout.text_starts[position], layout.text_places[position]
            tokens = batch.tokens_S1P[start : start + length]
            text = batch.text_L1E[text_start : text_start + slots]
            if not name:
                assert not tokens.any() and not text.any()
                continue
            index = int(name.removeprefix("train-"))
            latent = toy.latent_of(index)
            assert length == latent[0].numel() and (tokens == index).all()
            assert layout.segments[position].text_length == len(toy.text_of(index))
            assert (text == (index if len(toy.text_of(index)) else 0)).all()
            assert batch.fps_G[position] == (8.0 if index % 2 else 0.0)


def test_shapes_never_change(make_config):
    loader = build_train_loader(make_config(micro_batch_size=2), rank=0, world_size=1)
    for batch in islice(loader, 10):
        assert batch.tokens_S1P.shape[0] == batch.layout.capacity == 400
        assert batch.text_L1E.shape[0] == batch.layout.text_capacity == 80


def test_packs_are_full_because_leftovers_wait_for_the_next_buffer(make_config):
    loader = build_train_loader(make_config(seq_length=160, text_seq_length=100), rank=0, world_size=1)
    batches = list(islice(loader, 60))
    # 16 samples of 16 or 48 tokens fill 3.2 packs of 160: giving out the emptiest pack would leave a fifth unused
    assert sum(batch.num_tokens for batch in batches) / (60 * 160) > 0.95


def test_the_seed_decides_the_order(make_config):
    first, again, other = (
        read_samples(build_train_loader(make_config(seed=seed), rank=0, world_size=1), 50) for seed in (7, 7, 8)
    )
    assert first == again
    assert [name for name, _ in first] != [name for name, _ in other]


@pytest.mark.parametrize("setting", ["shuffle_buffer_size", "packing_buffer_size"])
def test_both_buffers_change_the_order(make_config, setting):
    small, large = (
        read_samples(build_train_loader(make_config(**{setting: size}), rank=0, world_size=1), 50) for size in (10, 50)
    )
    assert small != large


# --- resume -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "num_before", "storage"),
    [
        (0, 1, "json"),
        (0, 40, "torch"),
        (1, 0, "json"),
        (2, 31, "json"),
    ],
)
def test_resume_repeats_the_next_batches_exactly(make_config, num_workers, num_before, storage):
    config = make_config(num_workers=num_workers, micro_batch_size=2)
    loader = build_train_loader(config, rank=0, world_size=1)
    batches = iter(loader)
    for _ in range(num_before):
        next(batches)
    state = store_and_read(loader.save_state(), storage)
    expected = list(islice(batches, 12))

    resumed = build_train_loader(config, rank=0, world_size=1)
    resumed.restore_state(state)
    for batch, reference in zip(islice(resumed, 12), expected, strict=True):
        assert_same(batch, reference)


def store_and_read(state, storage: str):
    if storage == "json":
        return json.loads(json.dumps(state))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_saving_twice_and_resuming_twice(make_config):
    config = make_config()
    reference = list(islice(build_train_loader(config, rank=0, world_size=1), 40))
    state, position = None, 0
    for count in (3, 17, 20):
        loader = build_train_loader(config, rank=0, world_size=1)
        if state is not None:
            loader.restore_state(state)
        for batch in islice(loader, count):
            assert_same(batch, reference[position])
            position += 1
        state = loader.save_state()


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"num_workers": 1}, "data.num_workers"),
        ({"seq_length": 300}, "data.seq_length"),
        ({"shuffle_buffer_size": 21}, "data.shuffle_buffer_size"),
        ({"seed": 8}, "train.seed"),
        ({"conditioning": ("first_frame:0.5",)}, "data.conditioning"),
    ],
)
def test_resume_under_other_settings_is_an_error(make_config, changed, name):
    state = build_train_loader(make_config(), rank=0, world_size=1).save_state()
    with pytest.raises(UserError, match=f"{name} was .* and is .* now"):
        build_train_loader(make_config(**changed), rank=0, world_size=1).restore_state(state)


def test_a_damaged_state_is_an_error(make_config):
    loader = build_train_loader(make_config(), rank=0, world_size=1)
    state = loader.save_state()
    state["reader"]["class"] = "os.system"
    with pytest.raises(UserError, match="damaged"):
        build_train_loader(make_config(), rank=0, world_size=1).restore_state(state)


# --- ranks --------------------------------------------------------------------------------------------------------


def test_ranks_share_a_pass_without_overlap(make_config, toy):
    config = make_config()
    per_rank = [read_samples(build_train_loader(config, rank=rank, world_size=2), 240) for rank in range(2)]
    names = [{name for name, _ in samples} for samples in per_rank]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == toy.num_train


def test_ranks_times_workers_decides_the_packs(make_config):
    """Energon's reproducible scaling: one rank with two workers gives the packs of two ranks, step by step."""
    one_rank = islice(build_train_loader(make_config(num_workers=2), rank=0, world_size=1), 20)
    two_ranks = [islice(build_train_loader(make_config(num_workers=1), rank=rank, world_size=2), 10) for rank in (0, 1)]
    for batch, reference in zip(
        one_rank, (batch for step in zip(*two_ranks, strict=True) for batch in step), strict=True
    ):
        assert_same(batch, reference)


def test_workers_do_not_end_what_is_left_of_an_earlier_run(make_config, tmp_path):
    """Garbage that owns threads, as a process group does, would wait in a fork for the end of threads it has not."""

    class Left:
        def __init__(self):
            self.itself = self

        def __del__(self):
            (tmp_path / str(os.getpid())).touch()

    gc.disable()
    try:
        Left()
        next(build_train_loader(make_config(num_workers=2), rank=0, world_size=1))
    finally:
        gc.enable()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


# --- samples that cannot be used ----------------------------------------------------------------------------------


def test_unfit_samples_are_skipped_and_named(make_config, new_writer, toy, caplog):
    good = dict(caption="", num_frames=1, height=32, width=32, fps=0.0)
    text = torch.zeros(0, toy.text_width)
    with new_writer() as writer:
        for index in range(20):
            toy.add_sample(writer, "train", index)
        writer.add("train", "long", latent_CTHW=torch.zeros(4, 20, 4, 4), text_LE=text, **good)
        writer.add("train", "wordy", latent_CTHW=torch.zeros(4, 1, 4, 4), text_LE=torch.zeros(41, 8), **good)
        writer.add("train", "odd", latent_CTHW=torch.zeros(4, 1, 3, 4), text_LE=text, **good)
    config = make_config(path=str(writer.root))
    config = replace(config, model=replace(config.model, patch_spatial=2))
    with caplog.at_level(logging.WARNING):
        names = {name for name, _ in read_samples(build_train_loader(config, rank=0, world_size=1), 100)}
    assert names == {f"train-{index:05d}" for index in range(20)} | {"long"}  # 80 tokens with patches of 2
    messages = " / ".join(caplog.messages)
    assert "wordy: its text has more tokens than data.text_seq_length" in messages
    assert "odd: latent height 3 is not a multiple of the patch size 2" in messages
    with caplog.at_level(logging.WARNING):
        read_samples(build_train_loader(make_config(path=str(writer.root)), rank=0, world_size=1), 100)
    assert "long: it has more tokens than data.seq_length" in " / ".join(caplog.messages)


def test_broken_files_and_bad_numbers_are_skipped(make_config, new_writer, toy, caplog, monkeypatch):
    monkeypatch.setattr("megadit.train.data.writer.torch.isfinite", lambda x: torch.tensor(True))
    with new_writer() as writer:
        for index in range(1, 10):
            toy.add_sample(writer, "train", index)
        toy.add_sample(writer, "train", 20, latent_CTHW=torch.full((4, 1, 4, 4), torch.inf))
        monkeypatch.setattr("safetensors.torch.save", lambda tensors: b"not safetensors")
        toy.add_sample(writer, "train", 21)
    with caplog.at_level(logging.WARNING):
        loader = build_train_loader(make_config(path=str(writer.root)), rank=0, world_size=1)
        names = {name for name, _ in read_samples(loader, 100)}
    assert names == {f"train-{index:05d}" for index in range(1, 10)}
    assert "train-00020: it holds NaN or infinite values" in " / ".join(caplog.messages)
    assert "train-00021: unreadable" in " / ".join(caplog.messages)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_of_which_nothing_fits_is_an_error_not_a_hang(make_config, num_workers, capfd):
    loader = build_train_loader(make_config(seq_length=10, num_workers=num_workers), rank=0, world_size=1)
    with pytest.raises(UserError, match="more tokens than data.seq_length"):
        next(iter(loader))
    assert "Except" not in capfd.readouterr().out, "Energon says nothing of its own"


# --- validation ---------------------------------------------------------------------------------------------------


def test_validation_is_the_same_each_time_and_drops_no_text(make_config):
    loader = build_validation_loader(make_config(text_dropout=1.0), rank=0, world_size=1)
    first, second = list(loader), list(loader)
    assert len(first) == 5
    for batch, reference in zip(second, first, strict=True):
        assert_same(batch, reference)
    assert all(name.startswith("val-") for batch in first for name, _ in names_and_keys(batch))
    assert any(batch.text_L1E.any() for batch in first)


def test_validation_packs_do_not_depend_on_the_number_of_ranks(make_config):
    config = make_config()
    alone = list(build_validation_loader(config, rank=0, world_size=1))
    for rank in range(3):
        for batch, reference in zip(
            build_validation_loader(config, rank=rank, world_size=3), alone[rank::3], strict=True
        ):
            assert_same(batch, reference)


def test_a_pass_over_the_validation_split_loses_nothing(make_config, toy):
    config = make_config()
    config = replace(config, validation=replace(config.validation, num_batches=40))
    samples = [
        pair for batch in build_validation_loader(config, rank=0, world_size=1) for pair in names_and_keys(batch)
    ]
    first_pass = samples[: toy.num_val]
    assert {name for name, _ in first_pass} == {f"val-{index:05d}" for index in range(toy.num_val)}
    assert len(set(samples)) == len(samples), "a second pass over a small split must bring other noise"


def test_training_samples_can_stand_in_for_a_missing_split(make_config, new_writer, toy):
    with new_writer(splits=("train",)) as writer:
        for index in range(40):
            toy.add_sample(writer, "train", index)
    path = str(writer.root)
    with pytest.raises(UserError, match="data.use_train_split_for_val=true"):
        build_validation_loader(make_config(path=path), rank=0, world_size=1)
    loader = build_validation_loader(make_config(path=path, use_train_split_for_val=True), rank=0, world_size=1)
    assert all(name.startswith("train-") for batch in loader for name, _ in names_and_keys(batch))


def test_captions_of_the_validation_split(make_config):
    assert validation_captions(make_config(), 3) == ["sample 0", "sample 1", "sample 2"]
    assert len(validation_captions(make_config(), 1000)) == 30


# --- mistakes -----------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_named_at_once(make_config, tmp_path):
    for path in (None, str(tmp_path / "nowhere")):
        for build in (build_train_loader, build_validation_loader):
            with pytest.raises(UserError, match="megadit prepare"):
                build(make_config(path=path), rank=0, world_size=1)


@pytest.mark.parametrize(("name", "value"), [("in_channels", 16), ("crossattn_emb_size", 1024), ("sigma_data", 0.5)])
def test_data_of_another_model_are_refused(make_config, name, value):
    config = make_config()
    with pytest.raises(UserError, match=f"model.{name}={value} does not fit"):
        check_dataset(replace(config, model=replace(config.model, **{name: value})))


def test_samples_of_another_kind_are_refused_before_any_is_read(make_config, dataset):
    said = f"data.encode=on_the_fly does not fit {dataset}, which holds latents; set it to precached"
    for build in (build_train_loader, build_validation_loader):
        with pytest.raises(UserError, match=said):
            build(make_config(encode="on_the_fly"), rank=0, world_size=1)


def test_more_readers_than_samples_is_an_error(make_config):
    with pytest.raises(UserError, match="240 training samples for 300 readers"):
        build_train_loader(make_config(num_workers=3), rank=0, world_size=100)
