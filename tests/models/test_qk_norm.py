"""QK-norm and rotation in one step, against a plain composition and finite differences."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from megadit.models.config import DiTConfig
from megadit.models.embeddings import rotary_table
from megadit.models.qk_norm import QKNorm
from megadit.models.segments import grid_positions

CONFIG = DiTConfig(hidden_size=24, num_attention_heads=2)


def reference(x, weight, rotary):
    x = F.rms_norm(x, x.shape[-1:], eps=CONFIG.layernorm_epsilon) * weight
    if rotary is None:
        return x
    turn = torch.complex(rotary.cos.chunk(2, dim=-1)[0], rotary.sin.chunk(2, dim=-1)[1])
    pairs = torch.complex(*x.chunk(2, dim=-1)) * turn
    return torch.cat([pairs.real, pairs.imag], dim=-1)


@pytest.mark.parametrize("with_rotation", [True, False])
def test_equals_the_plain_composition(with_rotation):
    torch.manual_seed(0)
    norm = QKNorm(CONFIG).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(12, 1, 2, 12, dtype=torch.float64, requires_grad=True)
    rotary = rotary_table(grid_positions((3, 2, 2)), CONFIG, torch.float64) if with_rotation else None
    out, expected = norm(x, rotary), reference(x, norm.weight, rotary)
    # the reciprocal of the root mean square is float32
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    weight = torch.randn_like(out)
    ours = torch.autograd.grad(out, (x, norm.weight), weight)
    theirs = torch.autograd.grad(expected, (x, norm.weight), weight)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(norm(x, rotary), out), "inference and training compute the same"


def test_without_normalisation_it_only_rotates():
    norm = QKNorm(dataclasses.replace(CONFIG, qk_layernorm=False))
    assert not list(norm.parameters())
    x = torch.randn(12, 1, 2, 12, requires_grad=True)
    rotary = rotary_table(grid_positions((3, 2, 2)), CONFIG, torch.float32)
    out = norm(x, rotary)
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(norm(x), x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.shape == x.shape
