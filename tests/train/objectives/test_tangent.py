"""The derivative of a network along a direction is that of finite differences, in float64, whatever the network."""

from dataclasses import replace

import pytest
import torch

from megadit.models.configs.block import ExpertConfig
from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.parameterization import denoise_packed
from megadit.models.networks.dit import DiT
from megadit.models.ops.registry import FORCED
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.train.objectives import tangent
from megadit.train.objectives.tangent import COMMUNICATIONS, derivative

SMALL = dict(num_layers=2, hidden_size=48, num_attention_heads=4, in_channels=4, crossattn_emb_size=16)
LEARNED = {"position_embedding": "learned", "learned_positions": (4, 8, 8)}
NEMO = DiTConfig(**SMALL | {"hidden_size": 256}, family="nemo", position_embedding="sincos")
NETWORKS = {
    "megadit": DiTConfig(**SMALL),
    "conditioning": DiTConfig(**SMALL, conditioning_sigma=0.02),
    "told": DiTConfig(**SMALL, guidance_embedding_range=(1.0, 6.0)),
    "cosmos": DiTConfig(**SMALL, family="cosmos", adaln_lora_dim=4),
    "wan": DiTConfig(**SMALL, family="wan", parameterization="flow"),
    "st_dit": DiTConfig(**SMALL, family="st_dit", parameterization="flow"),
    "moviegen": DiTConfig(**SMALL, family="moviegen", num_query_groups=2, **LEARNED),
    "experts": DiTConfig(**SMALL, experts=ExpertConfig(num_experts=4, ffn_hidden_size=24)),
    "nemo": NEMO,
    "vp": replace(NEMO, parameterization="vp"),
}
STEP = 1e-5


@pytest.fixture
def in_float64(monkeypatch):
    """What is float32 in any network, sinusoids and preconditioning: rounded so, differences would be noise."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def asked(config):
    """(D of a pack, a point, a direction), float64."""
    generator = torch.Generator().manual_seed(0)
    dit = DiT(config).double()
    for parameter in dit.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator).double()
    given = () if config.conditioning_sigma is None else ((0, 2),)
    segments = [Segment((1, 2, 3), 3, clean=given), Segment((2, 2, 2), 2)]
    layout = PackLayout.pack(segments, capacity=16, text_capacity=8)
    x, direction = torch.randn(2, 16, 1, config.patch_dim, generator=generator).double()
    text_L1E = torch.randn(8, 1, 16, generator=generator).double()
    conditions = {"fps_G": torch.tensor([0.0, 8.0, 0.0]), "guidance_G": torch.tensor([1.0, 5.0, 1.0])}

    def D(x_S1P, sigma_G):
        return denoise_packed(dit, x_S1P, sigma_G, text_L1E, layout=layout, **conditions)

    point, along = torch.tensor([3.0, 0.5, 1.0]).double(), torch.tensor([1.0, -0.3, 0.2]).double()
    return D, (x, point), (direction, along)


@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_that_of_finite_differences(name, in_float64):
    D, points, directions = asked(NETWORKS[name])
    before = dict(FORCED)
    found = derivative(D, points, directions)

    @torch.no_grad()
    def at(steps):
        return D(*(point + steps * STEP * along for point, along in zip(points, directions, strict=True)))

    expected = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * STEP)  # of the fourth order
    assert found.dtype == torch.float64 and not found.requires_grad
    assert (found - expected).norm() < 1e-7 * expected.norm()
    for half in ((directions[0], 0 * directions[1]), (0 * directions[0], directions[1])):
        assert (derivative(D, points, half) - expected).norm() > 1e-3 * expected.norm(), "both directions matter"
    assert before == FORCED and not any("apply" in vars(function) for function in COMMUNICATIONS), (
        "nothing stays changed"
    )


def test_fast_forms_of_the_ops_have_none(monkeypatch):
    """The control: backwards of our own know nothing of tangents, and torch says so."""
    monkeypatch.setattr(tangent, "by_reference", torch.no_grad)
    with pytest.raises(RuntimeError, match="must implement the jvp function"):
        derivative(*asked(NETWORKS["megadit"]))
