"""Fused steps against plain compositions in float64: random packs, the extremes of sigma, float32 and bfloat16."""

import random

import pytest
import torch
import torch.nn.functional as F

from megadit.models import qk_norm
from megadit.models.config import DiTConfig
from megadit.models.dit import DiT
from megadit.models.embeddings import rotary_table
from megadit.models.modulation import gated_residual, modulated_norm
from megadit.models.modulation_by_token import gated_residual_by_token, modulated_norm_by_token, row_of_token
from megadit.models.segments import Segment, SegmentLayout

CONFIG = DiTConfig(num_layers=1, hidden_size=48, num_attention_heads=2, in_channels=4, crossattn_emb_size=8)
SIGMAS = (0.002, 80.0, 1e-5, 1e4, 0.5)
EPS = 1e-6
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 3e-2}
"""Relative error of a whole tensor: some roundings of 2^-24 or 2^-9, the sum of whose results partly cancels."""
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def random_pack(seed: int) -> SegmentLayout:
    """Segments of any lengths, neighbours sometimes equal, with and without padding."""
    chance = random.Random(seed)
    lengths = [chance.choice((1, 2, 7, 7, 30, 64)) for _ in range(chance.randint(1, 9))]
    segments = [Segment((1, 1, length), chance.randint(0, 3)) for length in lengths]
    spare = chance.choice((0, 5, 40))
    text = sum(segment.text_slots for segment in segments)
    return SegmentLayout.pack(segments, capacity=sum(lengths) + spare, text_capacity=text)


@torch.no_grad()
def modulation_rows(num_rows: int) -> list[torch.Tensor]:
    """float64 shift, scale and gate as a random network makes them of each of `SIGMAS` in turn."""
    torch.manual_seed(0)
    dit = DiT(CONFIG).double()
    for parameter in dit.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    sigma = torch.tensor([SIGMAS[row % len(SIGMAS)] for row in range(num_rows)])
    condition = dit.sigma_embedder(sigma.log() / 4, torch.float64)
    return list(dit.blocks["0"].modulation(condition)[:3])


def gradients(out, inputs):
    weight = torch.cos(torch.arange(out.numel(), device=out.device, dtype=torch.float64)).view_as(out)
    return torch.autograd.grad(out, inputs, weight.to(out.dtype))


def largest_error(ours, theirs):
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True))


def rounded(tensors, dtype, device):
    """(what the fused step gets, the same numbers in float64)."""
    ours = [tensor.to(device, dtype).requires_grad_() for tensor in tensors]
    return ours, [tensor.detach().double().requires_grad_() for tensor in ours]


def check_modulation(layout, dtype, device, norm, residual):
    """Errors of norm and residual, forward and gradients, beside a row gathered for each token."""
    torch.manual_seed(1)
    x, y = (100 * torch.randn(layout.capacity, 1, CONFIG.hidden_size, dtype=torch.float64) for _ in range(2))
    shift, scale, gate = modulation_rows(layout.num_segments)
    row_S = layout.segment_of_token_S.to(device)

    ours, exact = rounded((x, shift, scale), dtype, device)
    out = norm(*ours)
    expected = F.layer_norm(exact[0], x.shape[-1:], eps=EPS) * (1 + exact[2][row_S, None]) + exact[1][row_S, None]
    norm_error = largest_error((out, *gradients(out, ours)), (expected, *gradients(expected, exact)))

    ours, exact = rounded((x, gate, y), dtype, device)
    out = residual(*ours)
    expected = exact[0] + exact[1][row_S, None] * exact[2]
    return norm_error, largest_error((out, *gradients(out, ours)), (expected, *gradients(expected, exact)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("seed", range(6))
def test_modulation_of_a_pack_equals_a_row_for_each_token(seed, dtype, device):
    layout = random_pack(seed)
    row_S = row_of_token(layout.runs, torch.device(device))
    ways = {
        "by runs or, on a GPU, by token": (
            lambda x, shift, scale: modulated_norm(x, shift, scale, EPS, layout.runs),
            lambda x, gate, y: gated_residual(x, gate, y, layout.runs),
        ),
        "by token": (
            lambda x, shift, scale: modulated_norm_by_token(x, shift, 1 + scale, EPS, row_S),
            lambda x, gate, y: gated_residual_by_token(x, gate, y, row_S),
        ),
    }
    for name, functions in ways.items():
        assert max(check_modulation(layout, dtype, device, *functions)) < TOLERANCE[dtype], name


def test_rows_in_another_order_would_be_noticed():
    layout = random_pack(0)
    row_S = row_of_token(layout.runs, torch.device("cpu")).flip(0)
    errors = check_modulation(
        layout,
        torch.bfloat16,
        "cpu",
        lambda x, shift, scale: modulated_norm_by_token(x, shift, 1 + scale, EPS, row_S),
        lambda x, gate, y: gated_residual_by_token(x, gate, y, row_S),
    )
    assert min(errors) > 0.1


@pytest.mark.parametrize("size", [1, 2])
def test_rows_are_those_of_the_layout(size):
    layout = SegmentLayout.pack([Segment((1, 1, n), 1) for n in (5, 5, 3, 8, 8)], capacity=32, text_capacity=5)
    rows = [row_of_token(layout.local_runs(rank, size), torch.device("cpu")) for rank in range(size)]
    assert torch.equal(torch.cat(rows), layout.segment_of_token_S)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_norm_and_rotation_equal_their_composition(size, dtype, device):
    torch.manual_seed(0)
    positions = torch.randint(0, 60, (90, 3))
    norm = qk_norm.QKNorm(CONFIG)
    x, weight = size * torch.randn(90, 1, 2, 24, dtype=torch.float64), torch.randn(24, dtype=torch.float64)
    rotary = rotary_table(positions, CONFIG, dtype)
    cos, sin = (table.to(device) for table in rotary)
    ours, exact = rounded((x, weight), dtype, device)
    norm.weight = torch.nn.Parameter(ours[1].detach())
    out = norm(ours[0], type(rotary)(cos, sin))
    normed = F.rms_norm(exact[0], (24,), eps=norm.eps) * exact[1]
    swapped = torch.cat(normed.chunk(2, dim=-1)[::-1], dim=-1)
    expected = normed * cos.double() + swapped * sin.double()
    found = (out, *gradients(out, (ours[0], norm.weight)))
    # of the smallest inputs the square is near to eps, of which both have the same
    assert largest_error(found, (expected, *gradients(expected, exact))) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norms_are_the_same_by_runs_and_by_token(dtype):
    layout = random_pack(4)
    row_S = row_of_token(layout.runs, torch.device("cpu"))
    torch.manual_seed(2)
    x, weight = (
        5 + torch.randn(layout.capacity, 1, CONFIG.hidden_size).double(),
        torch.randn(CONFIG.hidden_size).double(),
    )
    shift, scale, _ = modulation_rows(layout.num_segments)
    ours, exact = rounded((x, shift, scale, weight), dtype, "cpu")
    normed = F.rms_norm(exact[0], x.shape[-1:], eps=EPS) * exact[3]
    expected = normed * (1 + exact[2][row_S, None]) + exact[1][row_S, None]
    theirs = (expected, *gradients(expected, exact))
    for out in (
        modulated_norm(*ours[:3], EPS, layout.runs, ours[3]),
        modulated_norm_by_token(*ours[:2], ours[3] * (1 + ours[2]), EPS, row_S, True),
    ):
        assert largest_error((out, *gradients(out, ours)), theirs) < TOLERANCE[dtype]
