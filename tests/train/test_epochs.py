"""Passes over a data set as steps."""

import math

import pytest

from megadit.models.shared.errors import UserError
from megadit.train.config.load import resolve_config
from megadit.train.data.dataset_info import DatasetInfo
from megadit.train.epochs import with_epochs


def run_of(path, *overrides):
    return resolve_config("digits_tiny", overrides=[f"data.path={path}", "data.global_batch_size=2", *overrides])


def test_an_epoch_is_all_training_samples(tiny_dataset):
    """Sixteen clips of 2 x 4 x 4 tokens and sixteen images of 4 x 4: a pack of 64 tokens has 64 / 24 of them."""
    samples = DatasetInfo.read(tiny_dataset).num_samples["train"]
    assert samples == 32
    for epochs in (1, 2.5, 10):
        found = with_epochs(run_of(tiny_dataset, f"train.max_epochs={epochs}", "data.seq_length=64"))
        assert found.train.train_iters == math.ceil(epochs * samples / (2 * 64 / 24))
    assert with_epochs(run_of(tiny_dataset)).train.train_iters == resolve_config("digits_tiny").train.train_iters


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
