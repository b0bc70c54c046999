"""Networks of every family train in packs exactly as they see their samples one by one."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from megadit.models.configs.block import ExpertConfig
from megadit.models.configs.config import DiTConfig
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.networks.embeddings import patchify
from megadit.models.networks.initialize import initialize_
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.models.shared.errors import UserError
from tests.bundles import random_network

COMMON = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "in_channels": 4, "crossattn_emb_size": 2}
COSMOS = DiTConfig(
    **COMMON,
    family="cosmos",
    adaln_lora_dim=6,
    rope_scale=(2.0, 1.0, 1.5),
    learned_positions=(4, 5, 4),
    padding_mask_channel=True,
)
NEMO = DiTConfig(**COMMON | {"hidden_size": 260}, family="nemo", position_embedding="sincos", layernorm_epsilon=1e-5)
DFM = dataclasses.replace(NEMO, family="dfm", adaln_lora_dim=6)
CLASSES = DiTConfig(
    **COMMON, family="dit", position_embedding="sincos", qk_layernorm=False, num_classes=600, parameterization="vp"
)
MOVIEGEN = DiTConfig(
    **COMMON,
    family="moviegen",
    num_query_groups=2,
    position_embedding="learned",
    learned_positions=(4, 5, 4),
    qk_layernorm=False,
)
MOVIEGEN_OF_NEMO = dataclasses.replace(MOVIEGEN, compat="nemo", hidden_size=260)
LOW_RANK = DiTConfig(**COMMON, adaln_lora_dim=6, learned_positions=(4, 5, 4))
TOKENS = DiTConfig(**COMMON, experts=ExpertConfig(num_experts=4, top_k=2, shared_ffn_hidden_size=16))
CHOICE = DiTConfig(**COMMON, experts=ExpertConfig(num_experts=4, routing="expert_choice"))
FAMILIES = {
    "cosmos": COSMOS,
    "nemo": NEMO,
    "dfm": DFM,
    "dit": CLASSES,
    "megadit": LOW_RANK,
    "moviegen": MOVIEGEN,
    "moviegen of nemo": MOVIEGEN_OF_NEMO,
    "st_dit": DiTConfig(**COMMON, family="st_dit", adaln_lora_dim=6, learned_positions=(4, 5, 4)),
    "wan": DiTConfig(**COMMON, family="wan", parameterization="flow"),
    "tokens": TOKENS,
    "experts": CHOICE,
}

SHAPES = ((3, 4, 4), (1, 4, 6), (3, 4, 4), (2, 8, 4))
TEXT_LENGTHS = (3, 0, 1, 2)
FPS = (12.0, 0.0, 30.0, 24.0)


def run_both(dit):
    """(outputs, gradients) of a pack, and of its samples one by one."""
    config = dit.config
    torch.manual_seed(1)
    latents = [torch.randn(1, config.in_channels, *shape, dtype=torch.float64) for shape in SHAPES]
    text = [torch.randint(0, 3, (1, max(n, 1), 2)).double() for n in TEXT_LENGTHS]
    c_noise, fps = torch.randn(5), torch.tensor([*FPS, 0.0])
    layout = PackLayout.pack(
        [Segment(config.token_grid(*shape), n) for shape, n in zip(SHAPES, TEXT_LENGTHS, strict=True)],
        capacity=60,
        text_capacity=7 + 3,
    )
    tokens = torch.cat([patchify(x, config) for x in latents])
    tokens = F.pad(tokens, (0, 0, 0, 0, 0, 60 - len(tokens)))
    packed_text = F.pad(torch.cat([t[0] for t in text]), (0, 0, 0, 3))[:, None]

    def packed():
        return dit.forward_packed(tokens, c_noise, packed_text, fps, layout)[: layout.num_tokens]

    def single(i):
        conditioning = Conditioning(text[i], torch.tensor([TEXT_LENGTHS[i]]), fps[i : i + 1])
        return patchify(dit(latents[i], c_noise[i : i + 1], conditioning), config)

    results = []
    for run in (packed, lambda: torch.cat([single(i) for i in range(len(SHAPES))])):
        dit.zero_grad()
        out = run()
        out.square().mean().backward()
        results.append((out.detach(), {name: p.grad.clone() for name, p in dit.named_parameters()}))
    return results


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pack_equals_its_samples_one_by_one(name):
    (packed, packed_grads), (single, single_grads) = run_both(random_network(FAMILIES[name], dtype=torch.float64))
    # float64 but for the tables of positions and noise levels, which both share
    torch.testing.assert_close(packed, single, rtol=1e-9, atol=1e-9)
    for key, grad in packed_grads.items():
        assert grad.abs().max() > 0, f"{key} has no gradient"
        # sums over a segment are kept in float32
        assert (grad - single_grads[key]).norm() <= 1e-5 * single_grads[key].norm(), key


@pytest.mark.parametrize("name", FAMILIES)
def test_networks_start_at_zero_and_can_leave_it(name):
    config = FAMILIES[name]
    dit = initialize_(DiT(config), 0)
    x, conditioning = torch.randn(1, 4, 2, 4, 4), Conditioning(torch.ones(1, 1, 2), torch.ones(1).long(), torch.ones(1))
    out = dit(x, torch.zeros(1), conditioning)
    assert out.abs().max() == 0
    (out - 1).square().sum().backward()
    assert dit.final_layer.linear.weight.grad.abs().max() > 0
    modulation = dit.blocks["0"].modulation
    if config.adaln_lora_dim is not None:
        assert modulation.down.weight.abs().max() > 0 and modulation.up[0].weight.abs().max() == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_scale", (2.0, 1.0, 1.0)),
        ("frequency_shift", 1.0),
        ("qk_layernorm_epsilon", 0.1),
        ("mlp_layernorm_epsilon", 0.1),
    ],
)
def test_each_number_reaches_the_network(field, value):
    dit = random_network(LOW_RANK, dtype=torch.float64)
    changed = DiT(dataclasses.replace(LOW_RANK, **{field: value})).double()
    changed.load_state_dict(dit.state_dict())
    x, conditioning = (
        torch.randn(1, 4, 2, 4, 4).double(),
        Conditioning(torch.ones(1, 1, 2), torch.ones(1), torch.ones(1)),
    )
    assert not torch.allclose(dit(x, torch.ones(1), conditioning), changed(x, torch.ones(1), conditioning), rtol=1e-7)


def test_no_text_is_a_row_of_zeros_where_text_is_read_as_it_is():
    dit = random_network(COSMOS, dtype=torch.float64)
    x, text, fps = torch.randn(1, 4, 1, 4, 4).double(), torch.randn(1, 3, 2), torch.zeros(1)
    null = dit(x, torch.zeros(1), Conditioning(text, torch.tensor([0]), fps))
    zeros = dit(x, torch.zeros(1), Conditioning(torch.zeros(1, 512, 2), torch.tensor([512]), fps))
    torch.testing.assert_close(null, zeros, rtol=1e-12, atol=1e-12)


def test_a_grid_beyond_the_learned_positions_is_refused():
    dit, conditioning = (
        random_network(COSMOS, dtype=torch.float64),
        Conditioning(torch.zeros(1, 1, 2), torch.zeros(1).long(), torch.ones(1)),
    )
    with pytest.raises(UserError, match=r"1x6x2 tokens .* more than the 4x5x4"):
        dit(torch.zeros(1, 4, 1, 12, 4).double(), torch.zeros(1), conditioning)


def test_classes_are_read_exactly_in_half_precision():
    dit = random_network(CLASSES, dtype=torch.float64).bfloat16()
    x, t, length = torch.randn(2, 4, 1, 4, 4).bfloat16(), torch.zeros(2), torch.ones(2).long()
    text = torch.tensor([[[2.0, 3.0]], [[2.0, 4.0]]]).bfloat16()
    out = dit(x[:1].expand(2, -1, -1, -1, -1), t, Conditioning(text, length, torch.zeros(2)))
    assert not torch.equal(out[0], out[1])


@pytest.mark.parametrize("name", ["moviegen", "st_dit"])
def test_a_network_can_learn_one_batch_by_heart(name):
    """From its initial weights, which make it the zero function, to a fraction of the error of that."""
    torch.manual_seed(0)
    dit = initialize_(DiT(FAMILIES[name]), 0)
    x, target = torch.randn(2, 2, 4, 1, 4, 4)
    conditioning = Conditioning(torch.randn(2, 2, 2), torch.tensor([2, 0]), torch.tensor([8.0, 0.0]))
    optimizer = torch.optim.AdamW(dit.parameters(), lr=1e-2, weight_decay=0.0)
    errors = []
    for _ in range(50):
        errors.append((dit(x, torch.tensor([-1.0, 1.0]), conditioning) - target).square().mean())
        optimizer.zero_grad()
        errors[-1].backward()
        optimizer.step()
    assert errors[-1] < 0.05 * errors[0]
