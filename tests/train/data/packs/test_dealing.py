"""Packs of equal work come to all readers at the same time; each comes once."""

import math
import random
from dataclasses import replace
from itertools import islice

import pytest

from megadit.models.packing.segments import Segment
from megadit.train.data.loader import build_train_loader
from megadit.train.data.packs.bin_packing import best_fit
from megadit.train.data.packs.dealing import dealt, pack_work, work_of
from megadit.train.plan.imbalance import expected_imbalance, uneven_packs
from megadit.train.recipes import load_recipe


class Reader:
    """Reads clips of log-uniform lengths, from 256 tokens to a whole pack, and packs a buffer of them at a time."""

    def __init__(self, number, capacity, buffer, width, *, in_order, together=1):
        self.random, self.capacity, self.buffer, self.width = random.Random(number), capacity, buffer, width
        self.in_order, self.together = in_order, together
        self.clips, self.filled, self.start = [], [], 0

    def packs(self):
        while True:
            low, high = math.log(256), math.log(self.capacity)
            missing = self.buffer - len(self.clips)
            self.clips += [(round(math.exp(self.random.uniform(low, high))), 1) for _ in range(missing)]
            packs = best_fit(self.clips, (self.capacity, self.buffer))
            tokens = [sum(self.clips[index][0] for index in pack) for pack in packs]
            left = packs.pop(tokens.index(min(tokens)))
            self.filled += [sum(self.clips[index][0] for index in pack) / self.capacity for pack in packs]
            h = self.width
            work = [
                sum(28 * n * h**2 + 4 * n**2 * h for n in (self.clips[index][0] for index in pack)) for pack in packs
            ]
            self.random.shuffle(work)
            if self.in_order:
                work = [work[place] for place in dealt(work, work, start=self.start, seed=3, together=self.together)]
            self.clips, self.start = [self.clips[index] for index in left], self.start + len(work)
            yield from work


def busiest(ranks, capacity, width, *, buffer, steps=60, micro_batches=1, **order):
    """(work of the busiest rank over the mean of all, in a mean step; how full the packs are)."""
    readers = [Reader(number, capacity, buffer, width, **order) for number in range(ranks)]
    streams = [reader.packs() for reader in readers]
    most = total = 0
    for _ in range(steps):
        work = [sum(islice(stream, micro_batches)) for stream in streams]
        most, total = most + max(work), total + sum(work)
    filled = [share for reader in readers for share in reader.filled]
    return most * ranks / total, sum(filled) / len(filled)


@pytest.mark.parametrize(
    ("capacity", "width", "at_random"), [(8192, 4096, 1.07), (37_000, 5120, 1.19), (74_000, 4096, 1.3)]
)
def test_no_rank_waits(capacity, width, at_random):
    """Lengths and widths of the 7B and 14B recipes, with work 28 n h^2 + 4 n^2 h a layer."""
    ratio, fill = busiest(8, capacity, width, buffer=2000, in_order=True)
    assert ratio < 1.03 and fill > 0.95
    assert busiest(8, capacity, width, buffer=2000, in_order=False)[0] > at_random, "negative control"


def test_micro_batches_of_a_step_are_equal_too():
    """The stages of a pipeline would wait for the heaviest."""

    def spread(together):
        stream = Reader(0, 37_000, 2000, 5120, in_order=True, together=together).packs()
        steps = [list(islice(stream, 4)) for _ in range(50)]
        return sum(max(step) for step in steps) / sum(sum(step) / 4 for step in steps)

    assert spread(4) < 1.02 and spread(1) > 1.15


@pytest.mark.parametrize("start", [0, 17])
def test_each_pack_has_one_place_that_depends_on_nothing_else(start):
    work, keys = [5, 1, 9, 1, 1, 7], [3, 9, 0, 2, 5, 1]
    order = dealt(work, keys, start=start, seed=1)
    assert sorted(order) == list(range(6)) and order == dealt(work, keys, start=start, seed=1)
    assert order != dealt(work, keys, start=start, seed=2)
    # readers whose buffers end elsewhere agree in what is heavy and what is light
    long = dealt(range(1000), range(1000), start=0, seed=1)
    late = dealt(range(700), range(700), start=300, seed=1)
    off = [abs(one / 1000 - other / 700) for one, other in zip(long[300:], late, strict=True)]
    assert max(off) < 0.08


def test_readers_of_a_data_set_have_equal_work(make_config):
    """Through Energon, on two ranks; nothing is read twice, nothing is left out."""

    def read(balance):
        config = make_config(balance=balance, num_workers=0, packing_buffer_size=40)
        loaders = [build_train_loader(config, rank=rank, world_size=2) for rank in range(2)]
        steps = list(islice(zip(*map(iter, loaders), strict=True), 12))
        work = [[pack_work(batch.layout.segments, config.model) for batch in step] for step in steps]
        names = [name for step in steps for batch in step for name in batch.sample_ids if name]
        return sum(map(max, work)) / sum(sum(step) / 2 for step in work), names

    (ratio, names), (at_random, others) = read("work"), read("tokens")
    assert ratio <= at_random
    assert len(names) == len(set(names)) and len(set(others)) == len(others)


def run_of(shapes, **data):
    run = load_recipe("digits")
    return replace(run, data=replace(run.data, path="data", mock_latent_shapes=shapes, **data))


def test_what_is_expected_before_a_run():
    lengths = tuple((2**n, 8, 8) for n in range(7))
    few = {"seq_length": 4096, "text_seq_length": 4096, "global_batch_size": 16}
    run = run_of(lengths, balance="tokens", **few)
    at_random = expected_imbalance(run, 8)
    in_order = expected_imbalance(run_of(lengths, packing_buffer_size=1000, **few), 8)
    assert 1 < in_order < 1 + (at_random - 1) / 2
    assert expected_imbalance(run, 1) == 1 and expected_imbalance(run_of(lengths[:1], **few), 8) == 1
    assert expected_imbalance(replace(run, data=replace(run.data, mock=True)), 8) == 1
    assert uneven_packs(run_of(lengths, packing_buffer_size=1000, **few), 2) > 1.15
    assert uneven_packs(run_of(lengths, packing_buffer_size=1000, balance="step", **few), 2) < 1.05


def test_few_sizes_are_computed_once():
    run = load_recipe("digits")
    work_of.cache_clear()
    segments = [run.model.sample_grid(frames, 4, 4) for frames in (1, 3) * 50]
    pack_work([Segment(grid, 3) for grid in segments], run.model)
    assert work_of.cache_info().misses == 2
