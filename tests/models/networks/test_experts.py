"""Experts: who computes what, that it adds up, and what keeps their loads equal."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from megadit.models.configs.block import ExpertConfig
from megadit.models.configs.config import DiTConfig
from megadit.models.networks.blocks import swiglu
from megadit.models.networks.dit import DiT
from megadit.models.networks.experts import (
    ExpertLoad,
    Experts,
    _Balance,
    chosen_by_experts,
    chosen_by_tokens,
    compute_here,
)
from megadit.models.packing.dense_layout import DenseLayout
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.models.shared.errors import UserError

TOKENS = ExpertConfig(num_experts=4, top_k=2)
CHOICE = ExpertConfig(num_experts=4, routing="expert_choice", capacity_factor=1.5)


def scores(num_tokens, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, batch, 4, generator=generator).softmax(-1)


@pytest.mark.parametrize(("activation", "factors"), [(F.gelu, 1), (swiglu, 2)])
def test_each_token_is_the_weighted_sum_of_its_experts(activation, factors):
    torch.manual_seed(0)
    experts = Experts(4, 6, 10, activation, factors).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x, weight, chosen = torch.randn(7, 2, 6).double(), scores(7, 2).double(), chosen_by_tokens(scores(7, 2), TOKENS)
    chosen[3] = False  # a token without experts
    expected = torch.zeros_like(x)
    for s, b, e in chosen.nonzero().tolist():
        expected[s, b] += weight[s, b, e] * (experts.fc2[e] @ activation(experts.fc1[e] @ x[s, b]))
    torch.testing.assert_close(compute_here(experts, x, weight, chosen), expected)
    torch.testing.assert_close(experts.on_all_tokens(x, weight * chosen), expected)
    assert expected[3].abs().max() == 0 < expected[2].abs().max()


def test_tokens_choose_their_best_experts():
    score = scores(9, 2)
    chosen = chosen_by_tokens(score, TOKENS)
    assert (chosen.sum(-1) == 2).all()
    assert (score.masked_fill(~chosen, 2).amin(-1) > score.masked_fill(chosen, -1).amax(-1)).all()


def test_experts_choose_equally_many_tokens_of_every_sample():
    layout = PackLayout.pack(
        [Segment((1, 2, 3), 1), Segment((1, 2, 3), 1), Segment((2, 2, 2), 1)], capacity=24, text_capacity=5
    )
    score = scores(24)
    chosen = chosen_by_experts(score, layout, experts=CHOICE)[:, 0]
    # 6 x 1.5 / 4 and 8 x 1.5 / 4, rounded up
    counts = [chosen[start : start + length].sum(0).tolist() for start, length in ((0, 6), (6, 6), (12, 8), (20, 4))]
    assert counts == [[3] * 4, [3] * 4, [3] * 4, [0] * 4]
    for start, length in ((0, 6), (6, 6), (12, 8)):
        part, taken = score[start : start + length, 0], chosen[start : start + length]
        assert (part.masked_fill(~taken, 2).amin(0) > part.masked_fill(taken, -1).amax(0)).all()
        dense = chosen_by_experts(part[:, None], DenseLayout((1, 1, length), None, None), experts=CHOICE)
        assert torch.equal(dense[:, 0], taken)


def test_the_balance_is_that_of_the_step_before():
    load, logits = ExpertLoad(4), torch.randn(6, 1, 4, dtype=torch.double, requires_grad=True)
    counts = torch.tensor([1, 5, 2, 0])
    load.set_counts(counts)
    score = logits.softmax(-1)
    chosen = chosen_by_tokens(score, TOKENS)
    chosen[4:] = False  # padding
    value = (score**2).sum()
    balance = 0.3 * 4 * (counts / 8 * score[:4, 0]).sum()
    (expected,) = torch.autograd.grad(value + balance, logits, retain_graph=True)
    balanced = _Balance.apply(score, chosen, load, 0.3)
    assert torch.equal(balanced, score)
    (found,) = torch.autograd.grad((balanced**2).sum(), logits)
    torch.testing.assert_close(found, expected)
    assert torch.equal(load.take_counts(), chosen.sum((0, 1))) and load.take_counts().sum() == 0


def test_equal_loads_are_left_alone():
    load, logits = ExpertLoad(4), torch.randn(6, 1, 4, requires_grad=True)
    score = logits.softmax(-1)
    (found,) = torch.autograd.grad(_Balance.apply(score, score > 0, load, 1.0).sum(), logits)
    assert found.abs().max() < 1e-6


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts": -1}, "model.experts.num_experts=-1 must not be negative"),
        ({"num_experts": 4, "top_k": 5}, "top_k=5 asks for more experts than model.experts.num_experts=4"),
        ({"num_experts": 4, "routing": "expert_choice", "capacity_factor": 4.5}, "capacity_factor=4.5 asks for more"),
        ({"routing": "experts"}, "routing='experts' is unknown; .*choose one of token_choice, expert_choice"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0 must be greater than 0"),
    ],
)
def test_impossible_values_are_named(values, message):
    with pytest.raises(UserError, match=message):
        ExpertConfig(**values)


def test_a_network_with_experts_is_written_and_read():
    config = DiTConfig(experts=dataclasses.replace(TOKENS, ffn_hidden_size=32))
    assert DiTConfig.from_dict(config.to_dict()) == config
    assert DiTConfig.from_dict({"num_layers": 12}) == DiTConfig(), "what older versions wrote has none"
    with pytest.raises(UserError, match="did you mean 'top_k'"):
        DiTConfig.from_dict({"experts": {"topk": 2}})
    with torch.device("meta"):
        mlp = DiT(config).blocks["0"].mlp
    assert mlp.experts.fc1.shape == (4, 32, 384) and mlp.experts.fc2.shape == (4, 384, 32)


@pytest.mark.parametrize("experts", [TOKENS, CHOICE], ids=["tokens", "experts"])
def test_every_setting_reaches_the_network(experts):
    config = DiTConfig(num_layers=1, hidden_size=24, num_attention_heads=2, experts=experts)

    def size(**changes):
        with torch.device("meta"):
            dit = DiT(dataclasses.replace(config, experts=dataclasses.replace(experts, **changes)))
        return sum(parameter.numel() for parameter in dit.parameters())

    assert size(num_experts=5) - size() == 2 * 24 * 96 + 24
    assert size() - size(ffn_hidden_size=95) == 4 * 2 * 24
    assert size(shared_ffn_hidden_size=10) - size() == 2 * 24 * 10
