"""What ranks send for attention along time and along space: tokens that move, measured against keys in a ring."""

import json
from pathlib import Path

import pytest

from megadit.models.networks.axial import find_move
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment, TokenMesh

JOB = Path(__file__).parent / "jobs" / "moved_bytes.py"
GRIDS = {"256 px": (32, 16, 16), "768 px": (32, 48, 48)}
WIDTH, FLOAT32 = 16, 4
ROUTES = (("home", "time"), ("time", "space"), ("space", "home"))


def tokens_moved(grid, context):
    """Tokens that the first rank sends to others in the three moves of a forward, counted from their plans."""
    layout = PackLayout.pack([Segment(grid, 1)], capacity=grid[0] * grid[1] * grid[2], text_capacity=1)
    plans = [find_move(layout.shard(TokenMesh(context=context)), *route) for route in ROUTES]
    return [sum(plan.num_sent) - plan.num_sent[0] for plan in plans]


@pytest.mark.parametrize("context", [2, 4, 8])
@pytest.mark.parametrize("video", GRIDS)
def test_two_moves_of_a_share_where_frames_divide(video, context):
    """T frames that divide among the ranks are at home already: the way back from whole frames sends nothing."""
    T, H, W = GRIDS[video]
    share = T * H * W // context
    assert tokens_moved((T, H, W), context) == [share * (context - 1) // context] * 2 + [0]
    assert 0 < tokens_moved((T - 1, H, W), context)[2] < share // context, "others go home from near by"


@pytest.mark.slow
@pytest.mark.parametrize("context", [2, 4])
def test_measured_bytes(run_ranks, tmp_path, context):
    """In forward and backward: 4 (n - 1) / n of a rank's tokens move; a ring passes (6 n - 4) of its share of k or v.

    (Keys and values n - 1 times in both, and their gradients n times.)
    """
    run_ranks(context, JOB, tmp_path)
    for rank in range(context):
        measured = json.loads((tmp_path / f"{rank}.json").read_text())
        for video, (T, H, W) in GRIDS.items():
            share = T * H * W // context * WIDTH * FLOAT32
            moves, ring = measured[video]["moves"], measured[video]["ring"]
            assert moves == 4 * share * (context - 1) // context
            assert ring == (6 * context - 4) * share
            # attention along both axes in rings would send twice that of attention over all tokens
            assert 2 * ring / moves == pytest.approx(context * (3 * context - 2) / (context - 1))
