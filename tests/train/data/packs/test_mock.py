"""Mock data: endless, the same packs for every number of ranks, resumable."""

import subprocess
import sys
from dataclasses import replace
from itertools import islice

import pytest
import torch

from megadit.models.shared.errors import UserError
from megadit.train.data.loader import build_train_loader, build_validation_loader

from ..test_loader import assert_same


def build(config, rank=0, world_size=1):
    return build_train_loader(config, rank=rank, world_size=world_size)


def test_two_ranks_read_what_one_reads(make_config):
    config = make_config(mock=True, path=None, micro_batch_size=2)
    alone = list(islice(build(config), 6))
    pair = [islice(build(config, rank, 2), 3) for rank in range(2)]
    for position, batch in enumerate(batch for step in zip(*pair, strict=True) for batch in step):
        assert_same(batch, alone[position])


def test_resume_on_another_number_of_ranks(make_config):
    config = make_config(mock=True, path=None)
    reference = list(islice(build(config), 8))
    loader = build(config)
    list(islice(loader, 4))
    state = loader.save_state()
    for rank in range(2):
        resumed = build(config, rank, 2)
        resumed.restore_state(state)
        for batch, expected in zip(islice(resumed, 2), reference[4 + rank :: 2], strict=True):
            assert_same(batch, expected)


def test_the_state_counts_only_what_was_given(make_config):
    loader = build(make_config(mock=True, path=None))
    assert loader.save_state() == {"num_packs": 0}
    next(iter(loader))
    assert loader.save_state() == {"num_packs": 1}


def test_a_state_that_does_not_fit_is_an_error(make_config):
    mock, real = build(make_config(mock=True, path=None, micro_batch_size=2)), build(make_config())
    with pytest.raises(UserError, match="data.mock=false"):
        mock.restore_state(real.save_state())
    with pytest.raises(UserError, match="data.mock=true"):
        real.restore_state(mock.save_state())
    with pytest.raises(UserError, match="after 3 packs"):
        mock.restore_state({"num_packs": 3})


def test_packs_are_made_of_the_given_shapes_and_nearly_full(make_config):
    batches = list(islice(build(make_config(mock=True, path=None, text_seq_length=200)), 20))
    grids = {part.grid for batch in batches for part in batch.layout.segments if not part.is_padding}
    assert grids == {(1, 4, 4), (3, 4, 4)}
    assert all(batch.num_tokens > 200 - 48 for batch in batches)
    assert len({name for batch in batches for name in batch.sample_ids if name}) > 20 * 3


def test_no_sample_comes_twice(make_config):
    config = make_config(mock=True, path=None)
    keys = [key for batch in islice(build(config), 50) for key in batch.noise_key_G.tolist() if key]
    assert len(set(keys)) == len(keys)


def test_other_seeds_give_other_numbers(make_config):
    first, other = (next(iter(build(make_config(mock=True, path=None, seed=seed)))) for seed in (1, 2))
    assert not torch.equal(first.tokens_S1P, other.tokens_S1P)


def test_a_pack_with_room_for_one_text_token_still_has_a_sample(make_config):
    batch = next(iter(build(make_config(mock=True, path=None, text_seq_length=1))))
    assert batch.num_tokens > 0


def test_training_has_no_end_and_validation_takes_nothing_from_it(make_config):
    config = make_config(mock=True, path=None, mock_latent_shapes=((1, 1, 1),), seq_length=2, text_seq_length=2)
    loader, names, of_validation = iter(build(config)), set(), set()
    for number in range(1030):
        names.update(name for name in next(loader).sample_ids if name)
        if number % 500 == 0:
            for batch in build_validation_loader(config, rank=0, world_size=1):
                of_validation.update(name for name in batch.sample_ids if name)
    assert {int(name.split("-")[1]) for name in names} == set(range(1030)) and not names & of_validation


def test_validation_is_finite_and_repeats(make_config):
    config = make_config(mock=True, path=None)
    alone = list(build_validation_loader(config, rank=0, world_size=1))
    assert len(alone) == config.validation.num_batches
    loader = build_validation_loader(config, rank=1, world_size=2)
    for _ in range(2):
        for batch, expected in zip(loader, alone[1::2], strict=True):
            assert_same(batch, expected)
    train = next(iter(build(config)))
    assert not torch.equal(train.tokens_S1P, alone[0].tokens_S1P)


def test_random_packs_are_made_where_energon_is_not_installed():
    program = """
import sys
sys.modules["megatron.energon"] = None
from megadit.train.data.loader import build_train_loader
from megadit.train.recipes import load_recipe
from dataclasses import replace
run = load_recipe("digits_tiny")
run = replace(run, data=replace(run.data, mock=True, path=None))
print(len(next(iter(build_train_loader(run, rank=0, world_size=1))).sample_ids) > 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_a_pair_larger_than_a_pack_is_refused(make_config):
    loader = build(make_config(mock=True, path=None, mock_latent_shapes=((1, 8, 8),), seq_length=64))
    loader.format = replace(loader.format, extras=("preference",))
    with pytest.raises(UserError, match="has 128 video and 22 text tokens .* more than a pack of data.seq_length=64"):
        loader.pack(0)
