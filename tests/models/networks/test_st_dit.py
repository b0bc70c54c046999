"""Attention along time and along space alone, against a plain reference: reshape, attend, reshape."""

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange

from megadit.models.configs.config import DiTConfig
from megadit.models.networks.attention import AxialInputs
from megadit.models.networks.axial import axial_layout, move
from megadit.models.networks.blocks import BlockInputs, STDiTBlock
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment

CONFIG = DiTConfig(
    family="st_dit", num_layers=1, hidden_size=24, num_attention_heads=2, ffn_hidden_size=40, qk_layernorm=False
)
GRIDS = ((3, 2, 4), (1, 3, 3), (2, 5, 1), (4, 1, 1), (3, 2, 4))
"""Ragged: a video, an image, a column of pixels, one pixel over time, and the first size again."""
LAYOUT = PackLayout.pack([Segment(grid, 2) for grid in GRIDS], capacity=80, text_capacity=12)


@pytest.fixture(scope="module")
def block():
    torch.manual_seed(0)
    block = STDiTBlock(CONFIG).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block


@pytest.fixture
def inputs():
    torch.manual_seed(1)
    shapes = {"x": (80, 1, 24), "condition": (LAYOUT.num_segments, 24), "text": (12, 1, 24)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def block_inputs(inputs):
    along = {axis: AxialInputs(layout=axial_layout(LAYOUT, axis)) for axis in ("time", "space")}
    return BlockInputs(condition_GD=inputs["condition"], text_LBD=inputs["text"], layout=LAYOUT, **along)


def attend(attention, q, kv=None):
    """Of [b, s, d] to itself, or to [b, l, d]."""
    if kv is None:
        q, k, v = rearrange(attention.qkv(q), "b s (n j k) -> j b n s k", j=3, k=12)
    else:
        k, v = rearrange(attention.kv(kv), "b l (n j k) -> j b n l k", j=2, k=12)
        q = rearrange(attention.q(q), "b s (n k) -> b n s k", k=12)
    return attention.proj(rearrange(F.scaled_dot_product_attention(q, k, v), "b n s k -> b s (n k)"))


def reference(block, x, condition, text, grid, *, swapped=False):
    """One sample, x [T H W, D], condition [D], text [L, D]. `swapped`: time where space should be."""
    sizes = dict(zip("THW", grid, strict=True))
    order = "(T H W) d"
    forms = [f"1 {order}", "(H W) T d", "T (H W) d"]
    if swapped:
        forms[1:] = forms[:0:-1]
    vectors = block.modulation(condition[None])

    def sublayer(x, i, function):
        shift, scale, gate = vectors[i]
        return x + gate * function(F.layer_norm(x, (24,), eps=CONFIG.layernorm_epsilon) * (1 + scale) + shift)

    def along(attention, form):
        return lambda h: rearrange(
            attend(attention, rearrange(h, f"{order} -> {form}", **sizes)), f"{form} -> {order}", **sizes
        )

    attentions = block.self_attention, block.temporal_attention, block.spatial_attention
    for i, (attention, form) in enumerate(zip(attentions, forms, strict=True)):
        x = sublayer(x, i, along(attention, form))
    x = sublayer(x, 3, lambda h: attend(block.cross_attention, h[None], text[None])[0])
    return sublayer(x, 4, lambda h: block.mlp.fc2(F.gelu(block.mlp.fc1(h))))


def test_the_block_is_the_reference_for_ragged_samples(block, inputs):
    found = block(inputs["x"], block_inputs(inputs))[:, 0]
    for i, grid in enumerate(GRIDS):
        here = slice(LAYOUT.starts[i], LAYOUT.starts[i] + LAYOUT.lengths[i])
        given = inputs["x"][here, 0], inputs["condition"][i], inputs["text"][2 * i : 2 * i + 2, 0]
        torch.testing.assert_close(found[here], reference(block, *given, grid), rtol=1e-9, atol=1e-9)
        if grid[0] > 1 and grid[1] * grid[2] > 1:
            other = reference(block, *given, grid, swapped=True)
            assert (other - found[here]).norm() > 1e-3 * found[here].norm(), "negative control: the axes differ"


@pytest.mark.parametrize("axis", ["time", "space"])
def test_attention_along_an_axis_sees_its_own_line_alone(block, inputs, axis):
    """Whatever token is disturbed, exactly those of the same pixel (frame) and sample answer."""
    attention = {"time": block.temporal_attention, "space": block.spatial_attention}[axis]
    along, tensors = axial_layout(LAYOUT, axis), LAYOUT.on("cpu")

    def run(x):
        there = move(x, LAYOUT, "home", axis)
        return move(attention(there, along, None), LAYOUT, axis, "home")[:, 0]

    before, position = run(inputs["x"]), tensors.positions_S3
    kept = [0] if axis == "space" else [1, 2]  # what tokens of one line have in common
    for token in (0, 5, 23, 26, 33, 43, 47, LAYOUT.num_tokens - 1):
        x = inputs["x"].clone()
        x[token] += 1.0
        answers = (run(x) - before).abs().amax(-1) > 1e-9
        is_same_line = (position[:, kept] == position[token, kept]).all(-1)
        is_same_sample = tensors.segment_of_token_S == tensors.segment_of_token_S[token]
        assert torch.equal(answers, is_same_line & is_same_sample), token


def test_gradients_flow_back_along_the_same_way(block, inputs):
    x = inputs["x"].clone().requires_grad_()
    block(x, block_inputs(inputs))[: LAYOUT.num_tokens].square().sum().backward()
    plain = inputs["x"].clone().requires_grad_()
    total = 0
    for i, grid in enumerate(GRIDS):
        here = slice(LAYOUT.starts[i], LAYOUT.starts[i] + LAYOUT.lengths[i])
        given = inputs["condition"][i], inputs["text"][2 * i : 2 * i + 2, 0]
        total = total + reference(block, plain[here, 0], *given, grid).square().sum()
    total.backward()
    torch.testing.assert_close(x.grad, plain.grad, rtol=1e-8, atol=1e-8)
