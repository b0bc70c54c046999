"""Fused steps, kernels and whole networks against plain compositions in float64.

On random packs, at the extremes of sigma, in float32 and bfloat16, forward and gradient.
"""

import dataclasses
import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megadit.models import attention, blocks, modulation_by_token, qk_norm, recompute
from megadit.models.conditioning import Conditioning
from megadit.models.config import DiTConfig
from megadit.models.dit import DiT
from megadit.models.embeddings import patchify, rotary_table
from megadit.models.modulation import gated_residual, modulated_norm
from megadit.models.modulation_by_token import gated_residual_by_token, modulated_norm_by_token, row_of_token
from megadit.models.segments import Segment, SegmentLayout

CONFIG = DiTConfig(num_layers=1, hidden_size=48, num_attention_heads=2, in_channels=4, crossattn_emb_size=8)
SIGMAS = (0.002, 80.0, 1e-5, 1e4, 0.5)
EPS = 1e-6
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 3e-2}
"""Relative error of a whole tensor: some roundings of 2^-24 or 2^-9, the sum of whose results partly cancels."""
FAMILIES = {
    name: dataclasses.replace(CONFIG, patch_spatial=1, family=name, **changes)
    for name, changes in {
        "megadit": {},
        "dit": {
            "crossattn_emb_size": 2,
            "num_classes": 9,
            "position_embedding": "sincos",
            "qk_layernorm": False,
            "preconditioner": "vp",
        },
        "cosmos": {"adaln_lora_dim": 6},
        "moviegen": {"position_embedding": "learned", "learned_positions": (2, 1, 64), "qk_layernorm": False},
        "st_dit": {},
    }.items()
}
NETWORK_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}
"""Of a network: dozens of roundings, one after another."""
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def random_pack(seed: int) -> SegmentLayout:
    """Segments of any lengths, neighbours sometimes equal, with and without padding."""
    chance = random.Random(seed)
    lengths = [chance.choice((1, 2, 7, 7, 30, 64)) for _ in range(chance.randint(1, 9))]
    grids = [(1, 1, length) if length % 2 else (2, 1, length // 2) for length in lengths]
    segments = [Segment(grid, chance.randint(0, 3)) for grid in grids]
    spare = chance.choice((0, 5, 40))
    text = sum(segment.text_slots for segment in segments)
    return SegmentLayout.pack(segments, capacity=sum(lengths) + spare, text_capacity=text)


def random_packs(count: int) -> list[SegmentLayout]:
    """With a sample of several tokens and frames, and one of several words: else some gradients are zero."""
    packs = (random_pack(seed) for seed in itertools.count())
    return list(itertools.islice((one for one in packs if max(one.lengths) >= 30 and max(one.text_slots) > 1), count))


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
    # numbers that bfloat16 has: all of them get the same gradient
    weight = torch.cos(torch.arange(out.numel(), device=out.device, dtype=torch.float64)).bfloat16().view_as(out)
    return torch.autograd.grad(out, inputs, weight.to(out.dtype))


def largest_error(ours, theirs):
    # of what is zero (a null token that no sample needs) nothing but zero is right
    return max(((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in zip(ours, theirs, strict=True))


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


# --- attention and MLP --------------------------------------------------------------------------------------------


def text_rows(layout):
    """int64 [L]: the segment of each text slot."""
    return torch.arange(layout.num_segments).repeat_interleave(torch.tensor(layout.text_slots))


def plain_attention(q, k, v, row_of_query_S, row_of_key_L):
    """Every query sees the keys of its segment: one mask over all of them."""
    scores_NSL = torch.einsum("sbnk,lbnk->nsl", q, k) / math.sqrt(q.shape[-1])
    scores_NSL = scores_NSL.masked_fill(row_of_query_S[:, None] != row_of_key_L, -math.inf)
    return torch.einsum("nsl,lbnk->sbnk", scores_NSL.softmax(-1), v).flatten(2)


def check_attention(layout, dtype, cross, size, kernel=attention.attend_runs):
    """Error of a projection of what each token attends to, and of the gradients of queries, keys, values and weight."""
    torch.manual_seed(3)
    row_S = layout.segment_of_token_S
    row_L = text_rows(layout) if cross else row_S
    is_sample_S = torch.tensor([not segment.is_padding for segment in layout.segments])[row_S]
    shapes = [(len(row_S), 1, 2, 24), *2 * [(len(row_L), 1, 2, 24)], (48, 48)]
    scales = (size, size, 1.0, 0.1)
    tensors = [scale * torch.randn(shape).double() for scale, shape in zip(scales, shapes, strict=True)]
    ours, exact = rounded(tensors, dtype, "cpu")
    out = kernel(*ours[:3], layout, cross, lambda x: F.linear(x, ours[3]))[is_sample_S]
    samples = [exact[0][is_sample_S], exact[1], exact[2]]
    expected = F.linear(plain_attention(*samples, row_S[is_sample_S], row_L), exact[3])
    return largest_error((out, *gradients(out, ours)), (expected, *gradients(expected, exact)))


@pytest.fixture
def nothing_is_small(monkeypatch):
    """Whatever may be recomputed in the backward is, and MLPs go slice by slice."""
    monkeypatch.setattr(recompute, "SMALL", 0)
    monkeypatch.setattr(blocks, "MLP_SLICE", 37)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_of_a_pack_equals_one_mask(dtype, cross, nothing_is_small):
    for layout, size in itertools.product(random_packs(6), (0.1, 1.0, 2.0)):  # nearly uniform, nearly one key
        assert check_attention(layout, dtype, cross, size) < 2 * TOLERANCE[dtype], (layout, size)


def test_a_neighbours_keys_would_be_noticed():
    def shifted(q, k, v, *rest):
        return attention.attend_runs(q, k.roll(1, 0), v.roll(1, 0), *rest)

    assert check_attention(random_packs(1)[0], torch.bfloat16, True, 1.0, shifted) > 0.1


@pytest.mark.parametrize("family", ["megadit", "dit", "moviegen"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_an_mlp_in_slices_equals_its_formula(dtype, family, nothing_is_small):
    activations = {"megadit": F.gelu, "dit": lambda x: F.gelu(x, approximate="tanh"), "moviegen": blocks.swiglu}
    mlp = DiT(FAMILIES[family]).blocks["0"].mlp.to(dtype)
    torch.manual_seed(4)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours, exact = rounded([torch.randn(100, 1, CONFIG.hidden_size).double(), *mlp.parameters()], dtype, "cpu")
    names = [name for name, _ in mlp.named_parameters()]
    weights = dict(zip(names, exact[1:], strict=True))
    out = torch.func.functional_call(mlp, dict(zip(names, ours[1:], strict=True)), (ours[0],))
    hidden = activations[family](F.linear(exact[0], weights["fc1.weight"], weights.get("fc1.bias")))
    expected = F.linear(hidden, weights["fc2.weight"], weights.get("fc2.bias"))
    assert largest_error((out, *gradients(out, ours)), (expected, *gradients(expected, exact))) < TOLERANCE[dtype]


# --- whole networks -----------------------------------------------------------------------------------------------


def network(config, dtype):
    """Random weights that bfloat16 has, too: both networks start from the same numbers."""
    torch.manual_seed(5)
    dit = DiT(config)
    for parameter in dit.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return dit.bfloat16().to(dtype)


def packed_and_single(config, layout, dtype):
    """(output and gradients of a pack in `dtype`, those of its samples one by one in float64)."""
    torch.manual_seed(6)
    samples = [segment for segment in layout.segments if not segment.is_padding]
    latents = [torch.randn(1, 4, *segment.grid).bfloat16() for segment in samples]
    text = torch.randint(0, 3, (layout.text_capacity, 1, config.crossattn_emb_size)).bfloat16()
    c_noise_G = torch.tensor([SIGMAS[g % len(SIGMAS)] for g in range(layout.num_segments)]).log() / 4
    fps_G = torch.tensor([24.0 * (g % 2) for g in range(layout.num_segments)])
    ours, exact = network(config, dtype), network(config, torch.float64)
    tokens = torch.cat([patchify(x, config) for x in latents])
    tokens = F.pad(tokens, (0, 0, 0, 0, 0, layout.capacity - len(tokens))).to(dtype)
    packed = ours.forward_packed(tokens, c_noise_G, text.to(dtype), fps_G, layout)[: layout.num_tokens]
    single = []
    for g, (segment, x) in enumerate(zip(samples, latents, strict=True)):
        start = layout.text_starts[g]
        features = text[start : start + segment.text_slots].transpose(0, 1).double()
        conditioning = Conditioning(features, torch.tensor([segment.text_length]), fps_G[g : g + 1])
        single.append(patchify(exact(x.double(), c_noise_G[g : g + 1], conditioning), config))
    return (packed, *gradients(packed, list(ours.parameters()))), (
        torch.cat(single),
        *gradients(torch.cat(single), list(exact.parameters())),
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_random_pack_equals_its_samples_one_by_one(family, dtype, nothing_is_small):
    for layout in random_packs(3):
        ours, theirs = packed_and_single(FAMILIES[family], layout, dtype)
        assert largest_error(ours, theirs) < NETWORK_TOLERANCE[dtype], layout


class Written(TorchDispatchMode):
    """Counts the numbers that operations make; attention's scores, inside a kernel, are not seen."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view:
            self.count += sum(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        return result


def numbers_written(config, count, tokens=1024):
    """By a step, forward and backward, over a pack of `tokens` in `count` samples, no two of equal length."""
    lengths = [tokens // count - count // 2 + index for index in range(count)]
    segments = [Segment((1, 1, length), 64 // count) for length in lengths]
    layout = SegmentLayout.pack(segments, capacity=tokens, text_capacity=64)
    dit, text = DiT(config), torch.ones(64, 1, config.crossattn_emb_size)
    x = torch.randn(tokens, 1, config.patch_dim)
    with Written() as written:
        c_noise_G, fps_G = torch.ones(2, layout.num_segments)
        dit.forward_packed(x, c_noise_G, text, fps_G, layout).sum().backward()
    return written.count


@pytest.mark.parametrize("family", FAMILIES)
def test_many_samples_cost_what_few_of_as_many_tokens_do(family):
    config = dataclasses.replace(FAMILIES[family], learned_positions=(2, 1, 1024) if family == "moviegen" else None)
    few, many = (numbers_written(config, count) for count in (2, 16))
    assert many < 1.2 * few


# --- what a GPU compiles ------------------------------------------------------------------------------------------


def test_chains_compile_whole_and_stay_what_they_are(monkeypatch):
    """As on a GPU: each chain one graph, for all sizes; its operations still one by one."""
    compiled = {}

    def as_on_a_gpu(function, *inputs):
        if function not in compiled:
            compiled[function] = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
        return compiled[function](*inputs)

    for module in (modulation_by_token, qk_norm):
        monkeypatch.setattr(module, "fused", as_on_a_gpu)
    for layout, dtype in itertools.product(random_packs(1), [torch.bfloat16]):
        row_S = row_of_token(layout.runs, torch.device("cpu"))
        errors = check_modulation(
            layout,
            dtype,
            "cpu",
            lambda x, shift, scale, row_S=row_S: modulated_norm_by_token(x, shift, 1 + scale, EPS, row_S),
            lambda x, gate, y, row_S=row_S: gated_residual_by_token(x, gate, y, row_S),
        )
        assert max(errors) < TOLERANCE[dtype]
        test_norm_and_rotation_equal_their_composition(1.0, dtype, "cpu")
    assert len(compiled) == 6
