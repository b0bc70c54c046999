"""Readers go on where others stopped, on another number of ranks."""

import json
import random
from itertools import islice

import pytest

from megadit.train.data.loader import build_train_loader
from megadit.train.data.redistribute import redistribute

pytestmark = pytest.mark.costs("forks readers, each of which costs as much as the process that tests holds in memory")


def build(make_config, ranks, workers):
    config = make_config(num_workers=workers)
    return [build_train_loader(config, rank=rank, world_size=ranks) for rank in range(ranks)]


def read_steps(loaders, micro_batches, count):
    """The samples, with their noise keys, of each step of `micro_batches` over all ranks."""
    iterators = [iter(loader) for loader in loaders]
    each = micro_batches // len(loaders)
    steps = []
    for _ in range(count):
        batches = [batch for iterator in iterators for batch in islice(iterator, each)]
        steps.append(sorted(pack_of(batch) for batch in batches))
    return steps


def pack_of(batch):
    pairs = zip(batch.sample_ids, batch.noise_key_G.tolist(), strict=True)
    return tuple(pair for pair in pairs if pair[0])


def go_on(make_config, saved, ranks, workers, micro_batches):
    loaders, said = build(make_config, ranks, workers), None
    for rank, loader in enumerate(loaders):
        mine = redistribute(saved, rank=rank, world_size=ranks, num_workers=workers, micro_batches=micro_batches)
        loader.restore_state(mine.state)
        said = mine.said
    return loaders, said


def states(loaders):
    return [json.loads(json.dumps(loader.save_state())) for loader in loaders]


@pytest.mark.parametrize(("before", "after", "num_steps"), [((2, 1), (1, 2), 8), ((4, 1), (2, 2), 12)])
def test_the_same_steps_on_as_many_readers(make_config, before, after, num_steps):
    """Four ranks, continued by two: the next batches of a buffer and of those after it."""
    micro_batches = before[0] * before[1]
    loaders = build(make_config, *before)
    read_steps(loaders, micro_batches, random.Random(micro_batches).randint(3, 20))
    saved = states(loaders)
    expected = read_steps(loaders, micro_batches, num_steps)
    resumed, said = go_on(make_config, saved, *after, micro_batches)
    assert said is None
    assert read_steps(resumed, micro_batches, num_steps) == expected


def test_nothing_is_lost_or_doubled_where_steps_take_part_of_the_readers(make_config):
    loaders = build(make_config, 2, 2)
    first = read_steps(loaders, 2, 3)
    resumed, said = go_on(make_config, states(loaders), 1, 4, 2)
    assert "none is lost or repeated" in said
    packs = [pack for step in first + read_steps(resumed, 2, 10) for pack in step]
    assert len(set(packs)) == len(packs)
    whole = [pack for step in first + read_steps(loaders, 2, 21) for pack in step]
    assert set(packs) <= set(whole)


def test_other_readers_begin_a_pass_with_noise_of_its_own(make_config):
    loaders = build(make_config, 2, 1)
    before = read_steps(loaders, 2, 25)
    resumed, said = go_on(make_config, states(loaders), 1, 1, 2)
    assert "2 ranks x data.num_workers=1 were 2 readers, and now there are 1" in said
    after = read_steps(resumed, 2, 25)
    keys = [{sample for step in part for pack in step for sample in pack} for part in (before, after)]
    assert not keys[0] & keys[1] and {name for name, _ in keys[0]} & {name for name, _ in keys[1]}
    again, said = go_on(make_config, states(resumed), 1, 1, 2)
    assert said is None
    assert read_steps(again, 2, 5) == read_steps(resumed, 2, 5)


@pytest.mark.parametrize(("ranks", "balance"), [(1, "work"), (2, "step"), (4, "work")])
def test_packs_of_equal_work_go_on_anywhere(make_config, ranks, balance):
    """Within a buffer and between two: the packs of each rank, in their order."""
    settings = {"num_workers": 0, "balance": balance, "global_batch_size": 8, "packing_buffer_size": 12}

    def build_ranks():
        return [build_train_loader(make_config(**settings), rank=rank, world_size=ranks) for rank in range(ranks)]

    loaders = build_ranks()
    readers = [iter(loader) for loader in loaders]
    for _ in range(5):
        saved = states(loaders)
        expected = [[pack_of(batch) for batch in islice(reader, 3)] for reader in readers]
        resumed = build_ranks()
        for loader, state in zip(resumed, saved, strict=True):
            loader.restore_state(state)
        assert [[pack_of(batch) for batch in islice(iter(loader), 3)] for loader in resumed] == expected


def test_as_many_ranks_keep_their_states(make_config):
    saved = states(build(make_config, 2, 1))
    kept = redistribute(saved, rank=1, world_size=2, num_workers=1, micro_batches=2)
    assert kept.state == saved[1] and kept.said is None
