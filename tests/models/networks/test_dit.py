"""The network: packs equal single samples, conditions matter, positions are right at any size."""

import dataclasses
import hashlib

import pytest
import torch

from megadit.models.configs.config import DiTConfig
from megadit.models.networks import blocks
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.networks.embeddings import patchify, rotary_table, sincos_table, unpatchify
from megadit.models.networks.initialize import initialize_
from megadit.models.ops import attention
from megadit.models.ops.registry import Variant
from megadit.models.packing.dense_layout import grid_positions
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from tests.bundles import random_network

CONFIG = DiTConfig(num_layers=2, hidden_size=48, num_attention_heads=4, in_channels=4, crossattn_emb_size=16)
SHAPES = ((3, 4, 4), (1, 4, 6), (3, 4, 4), (2, 8, 4), (1, 4, 6))
TEXT_LENGTHS = (3, 0, 5, 2, 4)


def random_dit(config: DiTConfig = CONFIG, dtype=torch.float64) -> DiT:
    return random_network(config, std=0.2, dtype=dtype)


class Samples:
    """Five samples of several sizes, one without text, as singles and as one pack."""

    def __init__(self, config: DiTConfig = CONFIG, dtype=torch.float64) -> None:
        torch.manual_seed(1)
        self.latents = [torch.randn(1, config.in_channels, *shape, dtype=dtype) for shape in SHAPES]
        self.text = [torch.randn(1, max(n, 1), config.crossattn_emb_size, dtype=dtype) for n in TEXT_LENGTHS]
        self.c_noise, self.fps = torch.randn(6, dtype=torch.float32), 30 * torch.rand(6)
        segments = [Segment(config.token_grid(*s), n) for s, n in zip(SHAPES, TEXT_LENGTHS, strict=True)]
        self.layout = PackLayout.pack(segments, capacity=80, text_capacity=20)
        tokens = torch.cat([patchify(x, config) for x in self.latents])
        self.tokens = torch.nn.functional.pad(tokens, (0, 0, 0, 0, 0, 80 - len(tokens)))
        text = torch.cat([t[0] for t in self.text])
        self.packed_text = torch.nn.functional.pad(text, (0, 0, 0, 20 - len(text)))[:, None]

    def conditioning(self, i: int) -> Conditioning:
        return Conditioning(self.text[i], torch.tensor([TEXT_LENGTHS[i]]), self.fps[i : i + 1])

    def run_packed(self, dit: DiT) -> torch.Tensor:
        return dit.forward_packed(self.tokens, self.c_noise, self.packed_text, self.fps, self.layout)

    def run_single(self, dit: DiT, i: int) -> torch.Tensor:
        return patchify(dit(self.latents[i], self.c_noise[i : i + 1], self.conditioning(i)), dit.config)


def packed_and_single(dit: DiT) -> tuple[tuple[torch.Tensor, dict], tuple[torch.Tensor, dict]]:
    """(outputs, gradients) of the pack, and of its samples one by one."""
    samples = Samples(dit.config)
    results = []
    for run in (
        lambda: samples.run_packed(dit)[: samples.layout.num_tokens],
        lambda: torch.cat([samples.run_single(dit, i) for i in range(len(SHAPES))]),
    ):
        dit.zero_grad()
        out = run()
        out.square().mean().backward()
        results.append((out.detach(), {name: p.grad.clone() for name, p in dit.named_parameters()}))
    return tuple(results)


def test_the_mlp_gives_the_same_slice_by_slice(monkeypatch):
    (whole, whole_grads), _ = packed_and_single(random_dit())
    monkeypatch.setattr(blocks, "MLP_SLICE", 7)
    (sliced, sliced_grads), _ = packed_and_single(random_dit())
    torch.testing.assert_close(sliced, whole, rtol=1e-12, atol=1e-12)
    for name, grad in sliced_grads.items():
        torch.testing.assert_close(grad, whole_grads[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("position", ["rope", "sincos"])
def test_a_pack_equals_its_samples_one_by_one(position):
    config = DiTConfig.from_dict({**CONFIG.to_dict(), "position_embedding": position})
    (packed, packed_grads), (single, single_grads) = packed_and_single(random_dit(config))
    # float64 but for the positions' and noise levels' tables, which both share
    torch.testing.assert_close(packed, single, rtol=1e-9, atol=1e-9)
    for name, grad in packed_grads.items():
        assert grad.abs().max() > 0, f"{name} has no gradient"
        # sums over a segment are kept in float32
        assert (grad - single_grads[name]).norm() <= 1e-6 * single_grads[name].norm(), name


def test_reversed_values_would_be_noticed(monkeypatch):
    """Negative control for the test above: attention with V reversed within each run must not pass it."""
    dit = random_dit()
    straight = attention.attend_by_length_group
    wrong = Variant("reversed", lambda q, k, v, *rest: straight(q, k, v.flip(0), *rest), lambda *_: True)
    monkeypatch.setitem(attention.attention.variants, "by_length_group", wrong)
    (packed, _), (single, _) = packed_and_single(dit)
    assert (packed - single).norm() > 0.01 * single.norm()


def test_neither_padding_nor_another_sample_isattended():
    dit, samples = random_dit(), Samples()
    before = samples.run_packed(dit)
    samples.tokens[60:] = 100.0
    samples.tokens[:12] += 1.0
    after = samples.run_packed(dit)
    assert torch.equal(before[12:54], after[12:54])
    assert not torch.equal(before[:12], after[:12])


def test_text_beyond_its_length_is_not_read():
    dit = random_dit()
    x, c_noise = torch.randn(2, 4, 2, 4, 4, dtype=torch.float64), torch.zeros(2)
    text, fps = torch.randn(2, 6, 16, dtype=torch.float64), torch.full((2,), 8.0)
    length = torch.tensor([4, 0])
    before = dit(x, c_noise, Conditioning(text, length, fps))
    text[0, 4:], text[1] = 7.0, -3.0
    assert torch.equal(before, dit(x, c_noise, Conditioning(text, length, fps)))
    text[0, 3] += 1
    assert not torch.equal(before[0], dit(x, c_noise, Conditioning(text, length, fps))[0])


@pytest.mark.parametrize("what", ["sigma", "fps", "text", "order of the text"])
def test_every_condition_changes_the_output(what):
    dit, samples = random_dit(), Samples()
    conditioning = samples.conditioning(2)
    c_noise = samples.c_noise[:1]
    before = dit(samples.latents[2], c_noise, conditioning)
    if what == "sigma":
        c_noise = c_noise + 0.05
    elif what == "fps":
        conditioning.fps_B[:] += 4
    elif what == "text":
        conditioning = conditioning.null()
    else:
        conditioning.text_BLE[0, 0] *= -1
    after = dit(samples.latents[2], c_noise, conditioning)
    assert (after - before).norm() > 1e-4 * before.norm()


def test_patchify_round_trip_in_documented_order():
    config = DiTConfig(patch_spatial=2, patch_temporal=2, in_channels=3)
    x = torch.arange(3 * 4 * 6 * 8, dtype=torch.float32).reshape(1, 3, 4, 6, 8)
    tokens = patchify(x, config)
    assert tokens.shape == (2 * 3 * 4, 1, config.patch_dim)
    assert torch.equal(unpatchify(tokens, (2, 3, 4), config), x)
    # token (t=1, h=2, w=3), element (pt=1, ph=0, pw=1, c=2)
    assert tokens[1 * 12 + 2 * 4 + 3, 0, ((1 * 2 + 0) * 2 + 1) * 3 + 2] == x[0, 2, 3, 4, 7]


@pytest.mark.parametrize("make", [rotary_table, "sincos"])
@pytest.mark.parametrize("grid", [(1, 1, 1), (3, 5, 2), (1, 100, 130), (40, 44, 80)])
def test_no_two_tokens_share_a_position(make, grid):
    positions = grid_positions(grid)
    if make == "sincos":
        table = sincos_table(positions, CONFIG, torch.float32)[:, 0]
    else:
        table = torch.cat(rotary_table(positions, CONFIG, torch.float32), dim=-1)[:, 0, 0]
    rows = {hashlib.sha1(row.numpy().tobytes()).digest() for row in table[:: max(1, len(table) // 20000)]}
    assert len(rows) == len(table[:: max(1, len(table) // 20000)])


def test_rotary_attention_depends_on_distance_alone():
    """Moving a whole grid by (2, 3, 1) changes no product of a rotated query and key (arXiv 2104.09864, eq. 16)."""
    norm = random_dit().blocks["0"].self_attention.q_layernorm
    q, k = torch.randn(2, 24, 1, 1, 12, dtype=torch.float64)

    def logits(shift: tuple[int, int, int]) -> torch.Tensor:
        rotary = rotary_table(grid_positions((2, 3, 4)) + torch.tensor(shift), CONFIG, torch.float64)
        return torch.einsum("SBNK,ZBNK->SZ", norm(q, rotary), norm(k, rotary))

    torch.testing.assert_close(logits((2, 3, 1)), logits((0, 0, 0)), rtol=1e-5, atol=1e-5)


def test_interpolated_positions_span_the_same_picture():
    """Every second token of a grid twice as dense is turned as that of the coarse one (arXiv 2306.15595, eq. 4)."""
    dense = dataclasses.replace(CONFIG, rope_interpolation=(1.0, 2.0, 2.0))
    fine, coarse = (
        torch.cat(rotary_table(grid_positions(grid), config, torch.float32), dim=-1).unflatten(0, grid)
        for grid, config in (((3, 8, 10), dense), ((3, 4, 5), CONFIG))
    )
    assert torch.equal(fine[:, ::2, ::2], coarse)
    assert not torch.equal(fine[:, 1::2, 1::2], coarse)


def test_initialisation_is_reproducible_and_starts_as_zero_output():
    first, second, other = (initialize_(DiT(CONFIG), seed) for seed in (3, 3, 4))
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        if a.std() > 0:
            assert not torch.equal(a, c), name
    samples = Samples(dtype=torch.float32)
    assert samples.run_packed(first).abs().max() == 0
