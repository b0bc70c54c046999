"""NeMo's and DFM's network, written down from its published description, equals ours after conversion."""

import math

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange

from megadit.models.configs.config import DiTConfig
from megadit.models.convert import nemo
from megadit.models.convert.converted import to_ours, to_theirs
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.storage.tensor_source import from_state_dict

LAYERS, WIDTH, HEADS, HEAD, TEXT = 2, 320, 4, 80, 24
GRID = (2, 3, 4)


def random_checkpoint(family):
    config = DiTConfig(
        family=family,
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        head_dim=HEAD,
        ffn_hidden_size=4 * WIDTH,
        crossattn_emb_size=TEXT,
        position_embedding="sincos",
        adaln_lora_dim=8 if family == "dfm" else None,
        layernorm_epsilon=nemo.EPSILON,
    )
    torch.manual_seed(0)
    ours = {name: 0.05 * torch.randn(tensor.shape) for name, tensor in DiT(config).state_dict().items()}
    ours = {name: tensor + ("layernorm" in name) for name, tensor in ours.items()}
    return config, to_theirs(from_state_dict(ours), nemo.entries(config)).state_dict()


def timesteps(value, width, shift):
    """[sin | cos] of value / 10000^(i / (half - shift))."""
    half = width // 2
    angle = value[:, None] * torch.exp(-math.log(10000) * torch.arange(half) / (half - shift))
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def mlp(w, name, x):
    x = F.silu(F.linear(x, w[f"{name}.linear_1.weight"], w[f"{name}.linear_1.bias"]))
    return F.linear(x, w[f"{name}.linear_2.weight"], w[f"{name}.linear_2.bias"])


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def axis_table(position, width):
    angle = position[:, None] / 10000 ** (torch.arange(width // 2) / (width / 2))
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def positions():
    """A quarter of the width for time, the rest for space, columns before rows."""
    t, y, x = (axis.flatten().float() for axis in torch.meshgrid(*map(torch.arange, GRID), indexing="ij"))
    space = 3 * WIDTH // 4
    return torch.cat([axis_table(t, WIDTH // 4), axis_table(x, space // 2), axis_table(y, space // 2)], dim=-1)


def attend(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def reference(w, tokens, c_noise, fps, text, family):
    """tokens [B, S, (ph pw pt c)], everything batch first."""
    emb = mlp(w, "t_embedder.1", timesteps(c_noise, WIDTH, 0))
    emb = emb + F.pad(mlp(w, "fps_embedder.1", timesteps(fps, 256, 1)), (0, WIDTH - 256))
    if family == "nemo":  # DFM makes this norm and does not call it
        emb = rms(emb, w["affline_norm.weight"], 1e-6)
    x = F.linear(tokens, w["x_embedder.weight"], w["x_embedder.bias"]) + positions()
    for i in range(LAYERS):
        p = f"decoder.layers.{i}"
        m = F.silu(emb)
        for j in (1, 2):
            if f"{p}.adaLN.adaLN_modulation.{j}.weight" in w:
                m = F.linear(m, w[f"{p}.adaLN.adaLN_modulation.{j}.weight"])
        m = [part[:, None] for part in m.chunk(9, dim=-1)]

        def modulated(x, shift, scale):
            return F.layer_norm(x, (WIDTH,), eps=1e-5) * (1 + scale) + shift

        h = F.linear(modulated(x, m[0], m[1]), w[f"{p}.full_self_attention.linear_qkv.weight"])
        q, k, v = rearrange(h, "b s (n j k) -> j b s n k", j=3, k=HEAD)  # one query group for each head
        q = rms(q, w[f"{p}.full_self_attention.q_layernorm.weight"], 1e-5)
        k = rms(k, w[f"{p}.full_self_attention.k_layernorm.weight"], 1e-5)
        x = x + m[2] * F.linear(attend(q, k, v), w[f"{p}.full_self_attention.linear_proj.weight"])
        h = F.linear(modulated(x, m[3], m[4]), w[f"{p}.cross_attention.linear_q.weight"])
        q = rms(h.unflatten(-1, (HEADS, HEAD)), w[f"{p}.cross_attention.q_layernorm.weight"], 1e-5)
        kv = F.linear(text, w[f"{p}.cross_attention.linear_kv.weight"])
        k, v = rearrange(kv, "b l (n j k) -> j b l n k", j=2, k=HEAD)
        k = rms(k, w[f"{p}.cross_attention.k_layernorm.weight"], 1e-5)
        x = x + m[5] * F.linear(attend(q, k, v), w[f"{p}.cross_attention.linear_proj.weight"])
        h = F.gelu(F.linear(modulated(x, m[6], m[7]), w[f"{p}.mlp.linear_fc1.weight"]))
        x = x + m[8] * F.linear(h, w[f"{p}.mlp.linear_fc2.weight"])
    return F.linear(x, w["final_layer_linear.weight"], w["final_layer_linear.bias"])


@pytest.mark.parametrize("family", ["nemo", "dfm"])
def test_the_network_is_the_described_one(family):
    config, theirs = random_checkpoint(family)
    assert nemo.config_from_shapes({name: tuple(tensor.shape) for name, tensor in theirs.items()}) == config
    dit = DiT(config).eval()
    dit.load_state_dict(to_ours(from_state_dict(theirs), nemo.entries(config), config).state_dict())
    frames, height, width = GRID
    x = torch.randn(2, 16, frames, 2 * height, 2 * width)
    c_noise, fps, text = torch.tensor([-0.4, 0.3]), torch.tensor([24.0, 30.0]), torch.randn(2, 7, TEXT)
    pattern = "b c t (h ph) (w pw) -> b (t h w) (ph pw c)"
    with torch.no_grad():
        expected = reference(theirs, rearrange(x, pattern, ph=2, pw=2), c_noise, fps, text, family)
        ours = dit(x, c_noise, Conditioning(text, torch.tensor([7, 7]), fps))
    found = rearrange(ours, pattern, ph=2, pw=2)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    without_input = reference(theirs, rearrange(x, pattern, ph=2, pw=2) * 0, c_noise, fps, text, family)
    assert (without_input - expected).norm() > 1e-3 * expected.norm(), "negative control: the input must matter"
