"""Axial layouts: which rank has which columns and frames, and how tokens get there."""

import pytest
import torch

from megadit.models.networks.axial import axial_layout, find_move
from megadit.models.ops.attention import attend_by_length_group
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment, TokenMesh

GRIDS = ((3, 2, 4), (1, 3, 3), (2, 5, 1), (4, 1, 1), (3, 2, 4))
"""Ragged: a video, an image, a column of pixels, one pixel over time, and the first size again."""
LAYOUT = PackLayout.pack([Segment(grid, 2) for grid in GRIDS], capacity=80, text_capacity=12)
MESHES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (3, 4)]


@pytest.mark.parametrize(("context", "slices"), MESHES)
@pytest.mark.parametrize("route", ["home time", "time space", "space home"])
def test_every_token_goes_where_it_belongs(context, slices, route):
    """All ranks' plans together move each token of a sample once, to the rank and place that has it there."""
    layout, (source, target) = LAYOUT, route.split()
    if source == "home" or target == "home":
        layout = PackLayout.pack(list(LAYOUT.segments[:-1]), capacity=84, text_capacity=12)  # 84 divides among all
    meshes = [TokenMesh(context, slices, rank) for rank in range(context * slices)]
    plans = [find_move(layout.shard(mesh), source, target) for mesh in meshes]
    for rank, plan in enumerate(plans):
        assert plan.num_received == tuple(other.num_sent[rank] for other in plans)
        assert len(set(plan.placed_S.tolist())) == len(plan.placed_S) <= plan.size
    assert sum(sum(plan.num_sent) for plan in plans) == layout.num_tokens
    back = [find_move(layout.shard(mesh), target, source) for mesh in meshes]
    for plan, other in zip(plans, back, strict=True):
        assert plan.num_sent == other.num_received and plan.num_received == other.num_sent


def test_lines_are_dealt_out_evenly():
    """A video of T x H x W gives each of n ranks T columns of H W / n pixels, and T / n frames."""
    layout = PackLayout.pack([Segment((8, 4, 6), 1)], capacity=192, text_capacity=1)
    for context in (2, 4, 8):
        for rank in range(context):
            shard = layout.shard(TokenMesh(context, 1, rank))
            columns, frames = (axial_layout(shard, axis).segments for axis in ("time", "space"))
            assert [one.grid for one in columns] == [(8, 1, 1)] * (24 // context)
            assert [one.grid for one in frames] == [(1, 4, 6)] * (8 // context)
    images = PackLayout.pack([Segment((1, 4, 4), 1)] * 8, capacity=128, text_capacity=8)
    for rank in range(4):  # whole images go to the ranks in turn
        assert len(axial_layout(images.shard(TokenMesh(4, 1, rank)), "space").segments) == 2


def test_a_rank_without_a_line_still_has_tokens():
    """One frame among two ranks: the second attends to padding, of which nothing comes back."""
    layout = PackLayout.pack([Segment((1, 2, 2), 1)], capacity=8, text_capacity=1)
    shard = layout.shard(TokenMesh(2, 2, 2))
    second = axial_layout(shard, "space")
    assert [one.grid for one in second.segments] == [(1, 1, 2)]
    qkv = torch.randn(2, 3, 1, 2, 4, requires_grad=True)
    attend_by_length_group(*qkv.unbind(1), second, False).sum().backward()
    assert qkv.grad is not None, "DDP waits for every parameter's gradient"
    assert sum(group.count * group.length for group in second.rows.groups) == 1
    assert sum(find_move(shard, "home", "space").num_received) == 0
