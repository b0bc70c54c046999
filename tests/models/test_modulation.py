"""Per-segment modulation against a plain reference that gathers a row per token."""

import pytest
import torch
import torch.nn.functional as F

from megadit.models.modulation import gated_residual, modulated_norm
from megadit.models.segments import Segment, SegmentLayout

LAYOUT = SegmentLayout.pack([Segment((1, 1, n), 1) for n in (5, 5, 3, 8, 8, 8, 1)], capacity=48, text_capacity=8)
WIDTH = 12


def inputs(count: int, dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(48, 1, WIDTH)] + [(LAYOUT.num_segments, WIDTH)] * (count - 1)
    return [torch.randn(s, generator=generator, dtype=dtype, requires_grad=True) for s in shapes]


def gathered(x_GD: torch.Tensor) -> torch.Tensor:
    return x_GD[LAYOUT.segment_of_token_S][:, None]


def reference_norm(x, shift, scale):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + gathered(scale)) + gathered(shift)


def test_modulated_norm_equals_gathering_forward_and_backward():
    x, shift, scale = inputs(3)
    out = modulated_norm(x, shift, scale, 1e-6, LAYOUT.runs)
    torch.testing.assert_close(out, reference_norm(x, shift, scale))
    weight = torch.randn_like(out)
    ours = torch.autograd.grad(out, (x, shift, scale), weight)
    theirs = torch.autograd.grad(reference_norm(x, shift, scale), (x, shift, scale), weight)
    for a, b in zip(ours, theirs, strict=True):
        # segment sums are kept in float32
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_gated_residual_equals_gathering_forward_and_backward():
    x, gate = inputs(2)
    y = torch.randn_like(x, requires_grad=True)
    out = gated_residual(x, gate, y, LAYOUT.runs)
    torch.testing.assert_close(out, x + gathered(gate) * y)
    weight = torch.randn_like(out)
    ours = torch.autograd.grad(out, (x, gate, y), weight)
    theirs = torch.autograd.grad(x + gathered(gate) * y, (x, gate, y), weight)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_segment_is_moved_by_its_own_row_alone():
    x, shift, scale = inputs(3)
    with torch.no_grad():
        before = modulated_norm(x, shift, scale, 1e-6, LAYOUT.runs)
        shift[2] += 1
        changed = (modulated_norm(x, shift, scale, 1e-6, LAYOUT.runs) != before).any(-1).flatten()
    assert torch.equal(changed, LAYOUT.segment_of_token_S == 2)


@pytest.mark.parametrize("size", [2, 4])
def test_slices_of_the_sequence_add_up(size):
    x, shift, scale = inputs(3)
    whole = modulated_norm(x, shift, scale, 1e-6, LAYOUT.runs)
    parts = [
        modulated_norm(part, shift, scale, 1e-6, LAYOUT.local_runs(rank, size))
        for rank, part in enumerate(x.chunk(size))
    ]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_a_dense_batch_broadcasts():
    x = torch.randn(6, 3, WIDTH, dtype=torch.float64)
    shift, scale = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    out = modulated_norm(x, shift, scale, 1e-6)
    expected = F.layer_norm(x[:, 1], (WIDTH,), eps=1e-6) * (1 + scale[1]) + shift[1]
    torch.testing.assert_close(out[:, 1], expected)
