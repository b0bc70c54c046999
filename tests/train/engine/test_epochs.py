"""Passes over a data set as steps."""

import math

import pytest

from megadit.models.shared.errors import UserError
from megadit.train.__main__ import with_epochs
from megadit.train.config.load import resolve_config, to_yaml
from megadit.train.dataset.dataset_info import DatasetInfo


def run_of(path, *overrides):
    return resolve_config("digits_tiny", overrides=[f"data.path={path}", "data.global_batch_size=2", *overrides])


def test_an_epoch_is_all_training_samples(tiny_dataset):
    """Sixteen clips of 2 x 4 x 4 tokens and sixteen images of 4 x 4: a pack of 64 tokens has 64 / 24 of them."""
    samples = DatasetInfo.read(tiny_dataset).num_samples["train"]
    assert samples == 32
    for epochs in (1, 2.5, 10):
        found = with_epochs(run_of(tiny_dataset, f"train.max_epochs={epochs}", "data.seq_length=64"))
        assert found.train.train_iters == math.ceil(epochs * samples / (2 * 64 / 24))
        assert found.train.max_epochs is None and with_epochs(found) == found, "what is saved says one length"
    assert with_epochs(run_of(tiny_dataset)).train.train_iters == resolve_config("digits_tiny").train.train_iters


def test_samples_of_an_odd_size_are_not_counted_on(tiny_dataset):
    """Images have one latent frame, which are no tokens of two."""
    found = with_epochs(run_of(tiny_dataset, "train.max_epochs=1", "data.seq_length=64", "model.patch_temporal=2"))
    assert found.train.train_iters == math.ceil(32 / (2 * 64 / 16))


def test_the_length_given_last_counts(tiny_dataset, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train: {max_epochs: 3}")
    overrides = [f"data.path={tiny_dataset}", "train.train_iters=7"]
    assert with_epochs(resolve_config("digits_tiny", config_file=file, overrides=overrides)).train.train_iters == 7
    assert resolve_config("digits_tiny", config_file=file).train.max_epochs == 3
    file.write_text("train: {train_iters: 7}")
    assert resolve_config("digits_tiny", config_file=file, overrides=["train.max_epochs=2"]).train.max_epochs == 2
    saved = with_epochs(run_of(tiny_dataset, "train.max_epochs=2"))
    file.write_text(to_yaml(saved))
    assert with_epochs(resolve_config(config_file=file)).train.train_iters == saved.train.train_iters


@pytest.mark.parametrize("steps", ["train.train_iters=7", "trainer.max_steps=7"])
def test_two_lengths_at_once_are_refused(tiny_dataset, steps):
    with pytest.raises(UserError, match="both say how long the run is; give one of them"):
        run_of(tiny_dataset, "train.max_epochs=2", steps)


@pytest.mark.slow
def test_a_data_set_smaller_than_one_global_batch_is_read_more_than_once_in_a_step(
    tiny_arguments, run_ranks, tmp_path, read_metrics
):
    """32 samples, of which each step takes some 80, on two ranks: all of them, about equally often."""
    settings = ("data.global_batch_size=32", "data.seq_length=64", "train.train_iters=2", "validation.interval=0")
    buffers = ("data.packing_buffer_size=4", "data.shuffle_buffer_size=4", "checkpoint.save_interval=2")
    run_ranks(2, *tiny_arguments, *settings, *buffers, f"train.output_dir={tmp_path}")
    first, last = read_metrics(tmp_path)
    assert first["consumed_samples"] > 2 * 32 and last["consumed_samples"] > 4 * 32
    assert all(math.isfinite(line[name]) for line in (first, last) for name in ("loss", "grad_norm"))


def test_nemos_name_is_understood(tiny_dataset):
    assert run_of(tiny_dataset, "trainer.max_epochs=3").train.max_epochs == 3.0


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["data.mock=true"], "data.mock=true has no end"),
        (["data.path=null"], "data.path is not set"),
        (["data.path=blend.yaml"], "blend.yaml blends data sets"),
        (["data.path=/nowhere"], "/nowhere does not exist"),
        (["data.seq_length=15"], "no sample of known size fits into data.seq_length=15"),
    ],
)
def test_where_no_number_of_samples_is_known_it_is_refused(tiny_dataset, overrides, why):
    with pytest.raises(UserError, match=why):
        with_epochs(run_of(tiny_dataset, "train.max_epochs=2", *overrides))
