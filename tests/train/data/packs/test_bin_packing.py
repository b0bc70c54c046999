"""Best-fit packing: nothing lost, nothing over capacity, little waste."""

import math
import random

import pytest

from megadit.train.data.packs.bin_packing import best_fit

CAPACITY = (8192, 4096)


def log_uniform_lengths(count: int, seed: int = 0) -> list[tuple[int, int]]:
    generator = random.Random(seed)
    low, high = math.log(256), math.log(8192)
    return [(round(math.exp(generator.uniform(low, high))), generator.randint(1, 64)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(3))
def test_every_sample_is_in_exactly_one_pack_that_holds_it(seed):
    lengths = log_uniform_lengths(500, seed)
    packs = best_fit(lengths, (8192, 100))  # little text: it binds before the tokens do
    assert sorted(index for pack in packs for index in pack) == list(range(500))
    for pack in packs:
        assert sum(lengths[index][0] for index in pack) <= 8192
        assert sum(lengths[index][1] for index in pack) <= 100


def test_packs_of_a_buffer_of_1000_are_at_least_99_percent_full():
    for seed in range(5):
        lengths = log_uniform_lengths(1000, seed)
        packs = best_fit(lengths, CAPACITY)
        assert sum(tokens for tokens, _ in lengths) / (len(packs) * 8192) >= 0.99


def test_first_fit_in_arrival_order_would_miss_that_fill_rate():
    """Negative control of the test above: order and choice of pack do matter."""
    lengths = log_uniform_lengths(1000)
    rooms: list[int] = []
    for tokens, _ in lengths:
        position = next((i for i, room in enumerate(rooms) if room >= tokens), None)
        if position is None:
            rooms.append(8192)
            position = len(rooms) - 1
        rooms[position] -= tokens
    assert sum(tokens for tokens, _ in lengths) / (len(rooms) * 8192) < 0.99


def test_same_lengths_give_the_same_packs():
    assert best_fit(log_uniform_lengths(300), CAPACITY) == best_fit(log_uniform_lengths(300), CAPACITY)


def test_samples_of_one_length_are_neighbours_in_a_pack():
    lengths = [(48 if index % 3 else 16, 5) for index in range(200)]
    for pack in best_fit(lengths, (640, 256)):
        tokens = [lengths[index][0] for index in pack]
        assert tokens == sorted(tokens)


def test_small_samples_of_different_sizes_share_packs():
    lengths = [(48 if index % 2 else 16, 5) for index in range(400)]
    packs = best_fit(lengths, (640, 256))
    mixed = [pack for pack in packs if len({lengths[index][0] for index in pack}) == 2]
    assert len(mixed) >= 0.9 * len(packs)


def test_a_sample_larger_than_a_pack_is_an_error():
    with pytest.raises(ValueError, match="exceeds a pack"):
        best_fit([(10, 1), (8193, 1)], CAPACITY)
    with pytest.raises(ValueError, match="exceeds a pack"):
        best_fit([(10, 4097)], CAPACITY)


def test_no_samples_make_no_packs():
    assert best_fit([], CAPACITY) == []


def test_packs_without_room_for_text_cost_no_more_time():
    """Every pack has tokens to spare and no text: looking at all of them for each sample would take minutes."""
    lengths = [(100, 60) for _ in range(20_000)] + [(10, 30) for _ in range(20_000)]
    packs = best_fit(lengths, (8192, 80))
    assert sorted(index for pack in packs for index in pack) == list(range(40_000))
    assert all(sum(lengths[index][1] for index in pack) <= 80 for pack in packs)


@pytest.mark.slow
def test_a_million_samples_are_packed_at_least_99_percent_full():
    lengths = log_uniform_lengths(1_000_000)
    packs = best_fit(lengths, CAPACITY)
    assert sum(tokens for tokens, _ in lengths) / (len(packs) * 8192) >= 0.99
