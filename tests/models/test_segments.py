"""Packs as plain integers."""

import pytest
import torch

from megadit.models.segments import Segment, SegmentLayout, Share, grid_positions
from megadit.models.shared.errors import UserError

CLIP, IMAGE = Segment((3, 2, 2), 4), Segment((1, 2, 3), 0)


def pack(*segments: Segment, capacity: int = 40, text_capacity: int = 16) -> SegmentLayout:
    return SegmentLayout.pack(segments, capacity=capacity, text_capacity=text_capacity)


def test_a_pack_is_filled_by_one_padding_segment():
    layout = pack(CLIP, IMAGE)
    assert layout.lengths == (12, 6, 22)
    assert layout.starts == (0, 12, 18)
    assert layout.text_slots == (4, 1, 11), "a sample without text takes one slot for the null token"
    assert (layout.capacity, layout.text_capacity, layout.num_tokens) == (40, 16, 18)
    assert layout.segments[-1].is_padding
    assert layout.token_mask_S.tolist() == [True] * 18 + [False] * 22
    assert layout.null_text_slots.tolist() == [4]


def test_a_full_pack_has_no_padding():
    layout = pack(CLIP, capacity=12, text_capacity=4)
    assert layout.num_segments == 1 and layout.num_tokens == layout.capacity == 12


@pytest.mark.parametrize("capacities", [{"capacity": 17}, {"text_capacity": 4}])
def test_what_does_not_fit_is_refused_with_its_size(capacities):
    with pytest.raises(UserError, match="18 video tokens and 5 text tokens"):
        pack(CLIP, IMAGE, **capacities)


def test_equal_neighbours_form_one_run():
    layout = pack(CLIP, CLIP, IMAGE)
    assert [(run.start, run.segment, run.count, run.length) for run in layout.runs] == [
        (0, 0, 2, 12),
        (24, 2, 1, 6),
        (30, 3, 1, 10),
    ]
    assert [run.is_padding for run in layout.runs] == [False, False, True]


def test_positions_count_within_each_grid():
    layout = pack(CLIP, IMAGE)
    assert torch.equal(layout.grid_positions_S3[:12], grid_positions((3, 2, 2)))
    assert torch.equal(layout.grid_positions_S3[12:18], grid_positions((1, 2, 3)))
    assert layout.position_in_segment_S.tolist() == [*range(12), *range(6), *range(22)]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_slices_of_a_pack_name_the_segment_of_every_token(size):
    layout = pack(CLIP, CLIP, IMAGE, CLIP, capacity=48, text_capacity=20)
    owner = []
    for rank in range(size):
        runs = layout.local_runs(rank, size)
        assert runs[-1].stop == 48 // size
        for run in runs:
            owner += [run.segment + i for i in range(run.count) for _ in range(run.length)]
    assert owner == layout.segment_of_token_S.tolist()


def test_packs_join_into_one_micro_batch():
    first, second = pack(CLIP, capacity=16), pack(IMAGE, capacity=16)
    both = SegmentLayout.concatenate([first, second])
    assert both.segments == first.segments + second.segments
    assert both.capacity == 32 and both.num_tokens == 18
    assert both.null_text_slots.tolist() == [16]


def test_the_text_of_a_run_is_rectangular():
    layout = pack(Segment((1, 2, 2), 3), Segment((1, 2, 2), 0), Segment((1, 2, 2), 2))
    slots, is_valid = layout.text_of_run(layout.runs[0])
    assert slots[is_valid].tolist() == [0, 1, 2, 3, 4, 5]
    assert is_valid.tolist() == [[True] * 3, [True, False, False], [True, True, False]]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shares_are_equal_and_make_up_the_whole(size):
    segments = [Segment(grid, 2) for grid in ((1, 1, 5), (2, 3, 3), (1, 1, 1), (1, 1, 1), (2, 4, 4), (1, 1, 5))]
    layout = SegmentLayout.pack(segments, capacity=72, text_capacity=16)
    shares = [layout.shared(Share(rank, rank + 1, size)) for rank in range(size)]
    assert {share.capacity for share in shares} == {72 // size}
    assert torch.cat([share.token_index_S for share in shares]).sort().values.tolist() == list(range(72))
    assert sum(share.num_tokens for share in shares) == layout.num_tokens
    for share in shares:
        sizes = zip(share.lengths, layout.lengths, strict=True)
        assert all(whole // size <= mine <= -(-whole // size) for mine, whole in sizes), "each segment is cut evenly"
        assert share.whole is layout


def test_a_share_knows_where_its_tokens_stand():
    layout = SegmentLayout.pack([Segment((2, 3, 3), 0), Segment((1, 1, 5), 3)], capacity=32, text_capacity=8)
    for rank in range(4):
        share = layout.shared(Share(rank, rank + 1, 4))
        index_S = share.token_index_S
        assert torch.equal(share.grid_positions_S3, layout.grid_positions_S3[index_S])
        assert torch.equal(share.segment_of_token_S, layout.segment_of_token_S[index_S])
        assert torch.equal(share.token_mask_S, layout.token_mask_S[index_S])
        assert share.text_slots == layout.text_slots


def test_shares_of_neighbours_join_up():
    layout = SegmentLayout.pack([Segment((1, 1, 7), 0), Segment((1, 3, 3), 0)], capacity=24, text_capacity=2)
    one, two = (layout.shared(Share(rank, rank + 1, 4)).token_index_S for rank in (2, 3))
    assert torch.equal(layout.shared(Share(2, 4, 4)).token_index_S, torch.cat([one, two]).sort().values)


def test_runs_of_a_share_leave_no_segment_out_in_between():
    """A segment without a token here parts its neighbours: a run is a range of segments."""
    layout = SegmentLayout.pack([Segment((1, 1, n), 0) for n in (4, 1, 4, 1, 4, 2)], capacity=16, text_capacity=6)
    for rank in range(4):
        share = layout.shared(Share(rank, rank + 1, 4))
        for run in share.runs:
            assert [share.lengths[segment] for segment in range(16)[run.segments]] == [run.length] * run.count
