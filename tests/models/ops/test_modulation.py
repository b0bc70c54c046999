"""Each segment of a pack is modulated by its own row alone, wherever the sequence is cut."""

import pytest
import torch

from megadit.models.ops.reference import modulated_norm
from megadit.models.packing.pack_layout import CPU, PackLayout
from megadit.models.packing.segments import Segment, TokenMesh

LAYOUT = PackLayout.pack([Segment((1, 1, n), 1) for n in (5, 5, 3, 8, 8, 8, 1)], capacity=48, text_capacity=8)
WIDTH = 12


def inputs(count: int, dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(48, 1, WIDTH)] + [(LAYOUT.num_segments, WIDTH)] * (count - 1)
    return [torch.randn(s, generator=generator, dtype=dtype, requires_grad=True) for s in shapes]


def test_a_segment_is_moved_by_its_own_row_alone():
    x, shift, scale = inputs(3)
    with torch.no_grad():
        before = modulated_norm(x, shift, scale, 1e-6, LAYOUT.rows)
        shift[2] += 1
        changed = (modulated_norm(x, shift, scale, 1e-6, LAYOUT.rows) != before).any(-1).flatten()
    assert torch.equal(changed, LAYOUT.on("cpu").segment_of_token_S == 2)


@pytest.mark.parametrize("size", [2, 4])
def test_slices_of_the_sequence_add_up(size):
    x, shift, scale = inputs(3)
    whole = modulated_norm(x, shift, scale, 1e-6, LAYOUT.rows)
    parts = [
        modulated_norm(part, shift, scale, 1e-6, LAYOUT.shard(TokenMesh(slices=size, rank=rank)).rows)
        for rank, part in enumerate(x.chunk(size))
    ]
    torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize("size", [1, 2])
def test_rows_are_those_of_the_layout(size):
    layout = PackLayout.pack([Segment((1, 1, n), 1) for n in (5, 5, 3, 8, 8)], capacity=32, text_capacity=5)
    rows = [layout.shard(TokenMesh(slices=size, rank=rank)).rows.of_token(CPU) for rank in range(size)]
    assert torch.equal(torch.cat(rows), layout.on(CPU).segment_of_token_S)
