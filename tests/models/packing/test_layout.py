"""Packs as plain integers, what tensors say of them, and what is computed once."""

import itertools
import pickle
import random
from dataclasses import fields
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves

from megadit.models.networks.blocks import BlockInputs
from megadit.models.packing.dense_layout import DenseLayout, TensorCache
from megadit.models.packing.pack_layout import CPU, PackLayout
from megadit.models.packing.segments import LengthGroup, Segment, TokenMesh, TokenSpan, text_of_group
from megadit.models.shared.errors import UserError

CLIP, IMAGE = Segment((3, 2, 2), 4), Segment((1, 2, 3), 0)


def pack(*segments: Segment, capacity: int = 40, text_capacity: int = 16) -> PackLayout:
    return PackLayout.pack(segments, capacity=capacity, text_capacity=text_capacity)


def test_a_pack_is_filled_by_one_padding_segment():
    layout = pack(CLIP, IMAGE)
    assert layout.lengths == (12, 6, 22)
    assert layout.starts == (0, 12, 18)
    assert layout.text_places == (4, 1, 11), "a sample without text takes one slot for the null token"
    assert (layout.capacity, layout.text_capacity, layout.num_tokens) == (40, 16, 18)
    assert layout.segments[-1].is_padding
    assert layout.on("cpu").is_sample_S.tolist() == [True] * 18 + [False] * 22
    assert layout.on("cpu").null_text_L.nonzero().tolist() == [[4]]


def test_a_full_pack_has_no_padding():
    layout = pack(CLIP, capacity=12, text_capacity=4)
    assert layout.num_segments == 1 and layout.num_tokens == layout.capacity == 12


@pytest.mark.parametrize("capacities", [{"capacity": 17}, {"text_capacity": 4}])
def test_what_does_not_fit_is_refused_with_its_size(capacities):
    with pytest.raises(UserError, match="18 video tokens and 5 text tokens"):
        pack(CLIP, IMAGE, **capacities)


def test_equal_neighbours_form_one_length_group():
    layout = pack(CLIP, CLIP, IMAGE)
    assert [(group.start, group.first, group.count, group.length) for group in layout.groups] == [
        (0, 0, 2, 12),
        (24, 2, 1, 6),
        (30, 3, 1, 10),
    ]
    assert [group.is_padding for group in layout.groups] == [False, False, True]


def test_packs_join_into_one_micro_batch():
    first, second = pack(CLIP, capacity=16), pack(IMAGE, capacity=16)
    both = PackLayout.concatenate([first, second])
    assert both.segments == first.segments + second.segments
    assert both.capacity == 32 and both.num_tokens == 18
    assert both.on("cpu").null_text_L.nonzero().tolist() == [[16]]


def test_the_text_of_a_group_is_rectangular():
    layout = pack(Segment((1, 2, 2), 3), Segment((1, 2, 2), 0), Segment((1, 2, 2), 2))
    slots, is_valid = text_of_group(layout.groups[0], layout.text_starts, layout.text_places)
    assert slots[is_valid].tolist() == [0, 1, 2, 3, 4, 5]
    assert is_valid.tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    texts = layout.on("cpu").texts
    assert texts.shapes[0] == (3, 3) and texts.slots[:9].tolist() == slots.flatten().tolist()
    assert torch.equal(texts.masks[0][:, 0, 0], is_valid)


# --- against token by token counting ------------------------------------------------------------------------------


def random_layout(seed: int) -> PackLayout:
    """Sizes with neighbours that are equal, or smaller than the number of ranks; 48 divides among all of them."""
    chance = random.Random(seed)
    grids = [(1, 1, 5), (2, 3, 3), (1, 1, 1), (1, 1, 1), (1, 2, 2), (3, 1, 2)]
    segments = [Segment(chance.choice(grids), chance.randint(0, 3)) for _ in range(chance.randint(1, 9))]
    tokens = sum(segment.num_tokens for segment in segments)
    spare = -tokens % 48 + 48 * chance.randint(0, 1)
    slots = sum(segment.text_places for segment in segments)
    return PackLayout.pack(segments, capacity=tokens + spare, text_capacity=slots + chance.randint(0, 4))


def counted(layout: PackLayout) -> list[tuple[int, int, tuple[int, int, int], bool]]:
    """(segment, index within it, (t, h, w), is sample) of every token of a pack."""
    tokens = []
    for index, segment in enumerate(layout.segments):
        positions = itertools.product(*map(range, segment.grid))
        tokens += [(index, place, position, not segment.is_padding) for place, position in enumerate(positions)]
    return tokens


def of_rank(layout: PackLayout, mesh: TokenMesh) -> list[int]:
    """The tokens of a CP shard, dealt out one by one: whole rounds in order, what is left round-robin."""
    owned: dict[int, list[list[int]]] = {}
    start = 0
    for index, segment in enumerate(layout.segments):
        sizes = [segment.num_tokens // mesh.context] * mesh.context
        for extra in range(segment.num_tokens % mesh.context):
            sizes[(start + extra) % mesh.context] += 1
        ends = list(itertools.accumulate(sizes, initial=start))
        owned[index] = [list(range(*ends[rank : rank + 2])) for rank in range(mesh.context)]
        start = ends[-1]
    ranks = range(mesh.context_rank, mesh.context_rank + mesh.width)
    return [token for shards in owned.values() for rank in ranks for token in shards[rank]]


SIZES = ((1,), (2, 1, 1), (4, 1, 2), (1, 4, 3), (2, 2, 3), (3, 4, 5), (4, 1, 2, 2))
"""Of a token mesh: CP shards, slices, rank, and shards taken together."""


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(8))
def test_tensors_say_of_every_token_what_counting_says(seed, sizes):
    whole, mesh = random_layout(seed), TokenMesh(*sizes)
    layout, tokens = whole.shard(mesh), counted(whole)
    tensors, expected = layout.on("cpu"), of_rank(whole, mesh)
    segment, place, position, is_sample = zip(*(tokens[index] for index in expected), strict=True)
    assert tensors.index_S.tolist() == expected
    assert tensors.segment_of_token_S.tolist() == list(segment)
    assert tensors.position_in_segment_S.tolist() == list(place)
    assert tensors.positions_S3.tolist() == [list(one) for one in position]
    assert tensors.is_sample_S.tolist() == list(is_sample) and layout.num_tokens == sum(is_sample)
    assert tensors.bounds.diff().tolist() == [segment.count(index) for index in range(layout.num_segments)]
    of_groups = [(row, group.is_padding) for group in layout.groups for row in members(group)]
    assert of_groups == [(index, not valid) for index, valid in zip(segment, is_sample, strict=True)]
    length = len(segment) // mesh.slices
    assert list(layout.rows.of_token(CPU)) == list(segment[mesh.slice * length :][:length])
    assert layout.whole is whole


def members(group: LengthGroup) -> list[int]:
    """The segment, or condition row, of each token of a group."""
    return [group.first + index for index in range(group.count) for _ in range(group.length)]


@pytest.mark.parametrize("seed", range(8))
def test_text_tensors_say_of_every_slot_what_counting_says(seed):
    layout = random_layout(seed)
    slots = [(index, slot) for index, count in enumerate(layout.text_places) for slot in range(count)]
    is_null = [layout.segments[i].text_length == 0 and not layout.segments[i].is_padding for i, _ in slots]
    tensors = layout.on("cpu")
    assert tensors.null_text_L.tolist() == is_null
    for index, segment in enumerate(layout.segments):
        if not segment.is_padding:
            assert slots[tensors.first_text_G[index]] == (index, 0)
            assert tensors.has_no_text_G[index] == (segment.text_length == 0)
    assert tensors.text_bounds.diff().tolist() == list(layout.text_places)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shards_are_equal_and_make_up_the_whole(size):
    segments = [Segment(grid, 2) for grid in ((1, 1, 5), (2, 3, 3), (1, 1, 1), (1, 1, 1), (2, 4, 4), (1, 1, 5))]
    layout = PackLayout.pack(segments, capacity=72, text_capacity=16)
    shards = [layout.shard(TokenMesh(context=size, rank=rank)) for rank in range(size)]
    assert {shard.capacity for shard in shards} == {72 // size}
    assert torch.cat([shard.on("cpu").index_S for shard in shards]).sort().values.tolist() == list(range(72))
    assert sum(shard.num_tokens for shard in shards) == layout.num_tokens
    for shard in shards:
        sizes = zip(shard.lengths, layout.lengths, strict=True)
        assert all(whole // size <= mine <= -(-whole // size) for mine, whole in sizes), "each segment is cut evenly"
        assert shard.text_places == layout.text_places


def test_groups_of_a_shard_leave_no_segment_out_in_between():
    """A segment without a token here parts its neighbours: a group is a range of segments."""
    layout = PackLayout.pack([Segment((1, 1, n), 0) for n in (4, 1, 4, 1, 4, 2)], capacity=16, text_capacity=6)
    for rank in range(4):
        shard = layout.shard(TokenMesh(context=4, rank=rank))
        for group in shard.groups:
            assert [shard.lengths[segment] for segment in range(16)[group.members]] == [group.length] * group.count


def test_rows_are_those_of_the_pieces():
    """Two pieces of one segment have a row each; attention still sees one segment."""
    layout = PackLayout((CLIP, IMAGE), TokenMesh(slices=2, rank=1), (TokenSpan(0, 4), TokenSpan(1, 8), TokenSpan(2, 6)))
    assert layout.rows.of_token(CPU).tolist() == [1] * 3 + [2] * 6
    assert [group.length for group in layout.groups] == [12, 6]


# --- what is computed once ----------------------------------------------------------------------------------------


def double(layout, value):
    return [2 * value]


def triple(layout, value):
    return [3 * value]


def dense(room: int | None = None) -> DenseLayout:
    kept = None if room is None else TensorCache(room)
    return DenseLayout((1, 2, 2), torch.ones(1, 3, dtype=torch.bool), torch.device("cpu"), kept=kept)


def test_a_value_is_computed_once_for_its_function_and_arguments():
    layout = pack(CLIP)
    assert layout.memo(double, 2) is layout.memo(double, 2)
    values = layout.memo(double, 1), layout.memo(triple, 1), layout.memo(double, 1.0), layout.memo(double, True)
    assert values == ([2], [3], [2.0], [2]) and [type(value) for (value,) in values[:3]] == [int, int, float]
    assert pack(CLIP).memo(double, 2) is not layout.memo(double, 2), "another layout"


class Table:
    def __init__(self, factor):
        self.factor = factor

    def look_up(self, layout):
        return self.factor


def test_two_values_that_one_key_would_stand_for_are_refused():
    """A function made on the spot says nothing of what it captures: the second would find the value of the first."""
    kept = dense(room=100)
    for layout in (pack(CLIP), kept):
        for factor in (2, 3):
            with pytest.raises(TypeError, match="lambda"):
                layout.memo(lambda layout, factor=factor: torch.tensor(factor))
            with pytest.raises(TypeError, match="<unnamed>"):
                layout.memo(partial(double, value=factor))
        with pytest.raises(TypeError, match="a tensor cannot be a key"):
            layout.memo(double, torch.ones(1))
        with pytest.raises(TypeError, match="unhashable"):
            layout.memo(double, [1])
    with pytest.raises(TypeError, match="lambda"):
        kept.per_condition(lambda owner: torch.ones(1), "owner")
    two, three = Table(2), Table(3)
    layout = pack(CLIP)
    assert (layout.memo(two.look_up), layout.memo(three.look_up)) == (2, 3), "a method is a key with its object"


def random_text(owner, shape):
    return torch.rand(shape)


def test_a_dense_batch_keeps_what_there_is_room_for():
    once = dense()
    assert once.memo(double, 1) is not once.memo(double, 1)
    assert not torch.equal(once.per_condition(random_text, "a", 4), once.per_condition(random_text, "a", 4))
    kept = dense(room=40)
    first = kept.per_condition(random_text, "a", 4)  # 16 bytes of 40
    assert kept.per_condition(random_text, "a", 4) is first
    assert kept.per_condition(random_text, "b", 4) is not first, "another network"
    large = kept.per_condition(random_text, "c", 4)
    assert kept.per_condition(random_text, "c", 4) is not large
    packed = pack(CLIP)
    assert packed.per_condition(random_text, "a", 4) is not packed.per_condition(random_text, "a", 4), (
        "others each time"
    )


def test_tensors_are_made_once_and_left_behind_when_sent():
    layout = pack(CLIP, IMAGE).shard(TokenMesh(2, 1, 1))
    assert layout.on("cpu").positions_S3 is layout.on(torch.device("cpu")).positions_S3
    sent = pickle.loads(pickle.dumps(layout))
    assert (sent.segments, sent.mesh) == (layout.segments, layout.mesh) and not sent._memo
    assert torch.equal(sent.on("cpu").index_S, layout.on("cpu").index_S)


def test_fsdp_finds_no_tensor_in_a_layout():
    """It searches the fields of a block's inputs for every block."""
    layout = pack(CLIP)
    layout.on("cpu").positions_S3, layout.rows.of_token(CPU)
    inputs = BlockInputs(condition_GD=torch.ones(1, requires_grad=True), text_LBD=None, layout=layout)
    assert [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)] == [inputs.condition_GD]
    assert not {field.name for field in fields(PackLayout)} & {"_memo", "rows"}
