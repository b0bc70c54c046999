"""Random packs through MLPs and whole networks against the same in float64, sample by sample.

At the extremes of sigma, in float32 and bfloat16, forward and gradient.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megadit.models.configs.config import DiTConfig
from megadit.models.networks import blocks
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.networks.embeddings import patchify
from megadit.models.ops import ledger
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from tests.bundles import random_network
from tests.models.ops.test_ops import random_packs

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
            "parameterization": "vp",
        },
        "cosmos": {"adaln_lora_dim": 6},
        "moviegen": {"position_embedding": "learned", "learned_positions": (2, 1, 64), "qk_layernorm": False},
        "st_dit": {},
        "wan": {"parameterization": "flow"},
    }.items()
}
NETWORK_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}
"""Of a network: dozens of roundings, one after another."""
MORE = {"wan": 3}
"""Norms over all heads add up more numbers, and tables of modulation are added to what every block shares."""
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def gradients(out, inputs):
    # numbers that bfloat16 has: all of them get the same gradient
    weight = torch.cos(torch.arange(out.numel(), device=out.device, dtype=torch.float64)).bfloat16().view_as(out)
    return torch.autograd.grad(out, inputs, weight.to(out.dtype))


def largest_error(ours, theirs):
    # of what is zero (a null token that no sample needs) nothing but zero is right
    return max(((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in zip(ours, theirs, strict=True))


def rounded(tensors, dtype):
    """(what the fused step gets, the same numbers in float64)."""
    ours = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    return ours, [tensor.detach().double().requires_grad_() for tensor in ours]


@pytest.fixture
def nothing_is_small(monkeypatch):
    """Whatever may be recomputed in the backward is, and MLPs go slice by slice."""
    monkeypatch.setattr(ledger, "SMALL", 0)
    monkeypatch.setattr(blocks, "MLP_SLICE", 37)


@pytest.mark.parametrize("family", ["megadit", "dit", "moviegen"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_an_mlp_in_slices_equals_its_formula(dtype, family, nothing_is_small):
    activations = {"megadit": F.gelu, "dit": lambda x: F.gelu(x, approximate="tanh"), "moviegen": blocks.swiglu}
    mlp = DiT(FAMILIES[family]).blocks["0"].mlp.to(dtype)
    torch.manual_seed(4)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours, exact = rounded([torch.randn(100, 1, CONFIG.hidden_size).double(), *mlp.parameters()], dtype)
    names = [name for name, _ in mlp.named_parameters()]
    weights = dict(zip(names, exact[1:], strict=True))
    out = torch.func.functional_call(mlp, dict(zip(names, ours[1:], strict=True)), (ours[0],))
    hidden = activations[family](F.linear(exact[0], weights["fc1.weight"], weights.get("fc1.bias")))
    expected = F.linear(hidden, weights["fc2.weight"], weights.get("fc2.bias"))
    assert largest_error((out, *gradients(out, ours)), (expected, *gradients(expected, exact))) < TOLERANCE[dtype]


# --- whole networks -----------------------------------------------------------------------------------------------


def network(config, dtype):
    """Random weights that bfloat16 has, too: both networks start from the same numbers."""
    return random_network(config, seed=5).bfloat16().to(dtype)


def packed_and_single(config, layout, dtype, device):
    """(output and gradients of a pack in `dtype`, those of its samples one by one in float64)."""
    torch.manual_seed(6)
    samples = [segment for segment in layout.segments if not segment.is_padding]
    latents = [torch.randn(1, 4, *segment.grid).bfloat16().to(device) for segment in samples]
    text = torch.randint(0, 3, (layout.text_capacity, 1, config.crossattn_emb_size)).bfloat16().to(device)
    c_noise_G = torch.tensor([SIGMAS[g % len(SIGMAS)] for g in range(layout.num_segments)], device=device).log() / 4
    fps_G = torch.tensor([24.0 * (g % 2) for g in range(layout.num_segments)], device=device)
    ours, exact = (network(config, each).to(device) for each in (dtype, torch.float64))
    tokens = torch.cat([patchify(x, config) for x in latents])
    tokens = F.pad(tokens, (0, 0, 0, 0, 0, layout.capacity - len(tokens))).to(dtype)
    packed = ours.forward_packed(tokens, c_noise_G, text.to(dtype), fps_G, layout)[: layout.num_tokens]
    single = []
    for g, (segment, x) in enumerate(zip(samples, latents, strict=True)):
        start = layout.text_starts[g]
        features = text[start : start + segment.text_places].transpose(0, 1).double()
        conditioning = Conditioning(features, torch.tensor([segment.text_length]), fps_G[g : g + 1])
        single.append(patchify(exact(x.double(), c_noise_G[g : g + 1], conditioning), config))
    return (packed, *gradients(packed, list(ours.parameters()))), (
        torch.cat(single),
        *gradients(torch.cat(single), list(exact.parameters())),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_random_pack_equals_its_samples_one_by_one(family, dtype, device, nothing_is_small):
    for layout in random_packs(3):
        ours, theirs = packed_and_single(FAMILIES[family], layout, dtype, device)
        assert largest_error(ours, theirs) < NETWORK_TOLERANCE[dtype] * MORE.get(family, 1), layout


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
    layout = PackLayout.pack(segments, capacity=tokens, text_capacity=64)
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
