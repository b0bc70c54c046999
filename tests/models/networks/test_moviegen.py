"""MovieGen's network: its sizes, its block against one written down anew, and NeMo's checkpoints of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange

from megadit import models
from megadit.models.configs.config import DiTConfig
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.convert import nemo_moviegen
from megadit.models.convert.converted import to_ours, to_theirs
from megadit.models.networks.blocks import BlockInputs
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.packing.dense_layout import DenseLayout
from megadit.models.storage.components import network_shapes
from megadit.models.storage.tensor_source import from_state_dict

BILLION = 1e9
WIDTH, HEADS, GROUPS, HEAD, TEXT = 288, 16, 8, 18, 24
GRID = (2, 3, 4)


def count(config, prefix=""):
    """Of the parameters with this prefix; all blocks are alike."""
    shapes = network_shapes(replace(config, num_layers=1))
    numbers = {name: torch.Size(shape).numel() for name, shape in shapes.items() if name.startswith(prefix)}
    return sum(each * (config.num_layers if name.startswith("blocks.") else 1) for name, each in numbers.items())


def as_nemo(config):
    """With text as wide as the network, as its releases had it."""
    return replace(config, compat="nemo", crossattn_emb_size=config.hidden_size)


def test_parameters_of_the_published_log():
    """One layer 1024 wide of the 5B network, one frame: NeMo's log has buckets of 38,339,584 and 2,610,752."""
    log = replace(
        NAMED_CONFIGS["moviegen_5b"], num_layers=1, hidden_size=1024, learned_positions=(1, 120, 120), compat="nemo"
    )
    assert log.dim_per_head == 42
    assert count(log, "blocks.") == 38_339_584
    assert count(log) - count(log, "blocks.") == 2_610_752


@pytest.mark.parametrize(
    ("name", "billions"),
    [("moviegen_1b", 1.64), ("moviegen_3b", 5.46), ("moviegen_5b", 6.24), ("moviegen_30b", 36.8)],
)
def test_parameters_of_the_sizes(name, billions):
    config = NAMED_CONFIGS[name]
    D, A, G, M = config.hidden_size, config.attention_size, 8 * config.dim_per_head, config.mlp_size
    layer = D * (A + 2 * G) + A * D + 4 * D * A + 3 * D * M + 6 * D * D
    nemo = as_nemo(config)
    assert count(nemo, "blocks.") == config.num_layers * (layer + D)
    # sinusoids and an MLP for noise level and frame rate, patches in and out, positions, a norm
    ends = 2 * (D + 1) * D + 2 * 257 * 256 + 65 * D + 64 * (D + 1) + (128 + 240) * D + D
    assert count(nemo) - count(nemo, "blocks.") == ends
    # the published figures count the layers
    assert f"{count(nemo, 'blocks.') / BILLION:.3g}" == f"{billions:.3g}"
    # the paper's form: three norms a layer in place of one; text projected, its null token, a modulated last norm
    paper = 2 * (257 * D + (D + 1) * D) + 65 * D + 64 * (D + 1) + (128 + 240) * D + 1025 * D + D + 2 * D * D + D
    assert count(config) == config.num_layers * (layer + 3 * D) + paper
    # and the README says so
    sizes = (Path(models.__file__).parent / "README.md").read_text()
    assert f"| `{name}` | {count(nemo):,} | {count(config):,} |" in sizes


def rms(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def attend(q, k, v):
    """[b, s, heads, K] each; the queries of a group have its keys."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def split_groups(qkv):
    """q [b, s, HEADS, K], k and v [b, s, GROUPS, K], of rows in groups of queries, key and value."""
    grouped = rearrange(qkv, "b s (g j k) -> b s g j k", g=GROUPS, k=HEAD)
    return grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]


def reference_block(w, x, text, emb, positions, *, is_nemo):
    """`w`: NeMo's names, without `decoder.layers.0.`; two more norms in the paper's form."""
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = F.linear(
        F.silu(emb), w["adaLN.adaLN_modulation.1.weight"]
    ).chunk(6, dim=-1)
    x = x + positions
    h = rms(x, w["adaLN.ln.weight"]) * (1 + scale_1[:, None]) + shift_1[:, None]
    q, k, v = split_groups(F.linear(h, w["self_attention.linear_qkv.weight"]))
    x = x + gate_1[:, None] * F.linear(attend(q, k, v), w["self_attention.linear_proj.weight"])
    h = x if is_nemo else rms(x, w["text_norm"])
    q = F.linear(h, w["cross_attention.linear_q.weight"]).unflatten(-1, (HEADS, HEAD))
    kv = F.linear(text, w["cross_attention.linear_kv.weight"])
    k, v = rearrange(kv, "b l (n j k) -> j b l n k", j=2, k=HEAD)
    c = F.linear(attend(q, k, v), w["cross_attention.linear_proj.weight"])
    if not is_nemo:
        x = c = x + c
    weight = w["adaLN.ln.weight"] if is_nemo else w["mlp_norm"]
    h = rms(c, weight) * (1 + scale_2[:, None]) + shift_2[:, None]
    gate, value = F.linear(h, w["mlp.linear_fc1.weight"]).chunk(2, dim=-1)
    return x + gate_2[:, None] * F.linear(F.silu(gate) * value, w["mlp.linear_fc2.weight"])


def small(**values):
    return DiTConfig(
        family="moviegen",
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        head_dim=HEAD,
        num_query_groups=GROUPS,
        ffn_hidden_size=40,
        crossattn_emb_size=TEXT,
        position_embedding="learned",
        learned_positions=(2, 5, 4),
        qk_layernorm=False,
        layernorm_epsilon=1e-5,
        **values,
    )


def random_dit(config):
    dit = DiT(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in dit.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return dit


def names_of_nemo(dit):
    """Our tensors under NeMo's names; in the paper's form its two further norms under names of this file."""
    config = replace(dit.config, compat="nemo")
    state = dit.state_dict()
    theirs = {}
    for entry in nemo_moviegen.entries(config):
        if entry.name in state:
            theirs.update(zip(entry.theirs, entry.split(state[entry.name]), strict=True))
    prefix = "decoder.layers.0."
    found = {name.removeprefix(prefix): tensor for name, tensor in theirs.items() if name.startswith(prefix)}
    for name in ("text", "mlp"):
        found[f"{name}_norm"] = state.get(f"blocks.0.{name}_layernorm.weight")
    return found


@pytest.mark.parametrize("compat", [None, "nemo"])
def test_the_block_is_the_described_one(compat):
    torch.manual_seed(0)
    dit = random_dit(small(compat=compat))
    x, emb = torch.randn(2, 24, WIDTH, dtype=torch.float64), torch.randn(2, WIDTH, dtype=torch.float64)
    text = torch.randn(2, 7, TEXT if compat else WIDTH, dtype=torch.float64)
    positions = torch.randn(1, 24, WIDTH, dtype=torch.float64)
    weights = names_of_nemo(dit)
    expected = reference_block(weights, x, text, emb, positions, is_nemo=compat == "nemo")

    layout = DenseLayout(GRID, torch.ones(2, 7, dtype=torch.bool), torch.device("cpu"))
    inputs = BlockInputs(
        condition_GD=emb, text_LBD=text.transpose(0, 1), layout=layout, positions_SBD=positions.transpose(0, 1)
    )
    found = dit.blocks["0"](x.transpose(0, 1), inputs).transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    other = reference_block(weights | {"text_norm": weights["adaLN.ln.weight"], "mlp_norm": weights["adaLN.ln.weight"]},
                            x, text, emb, positions, is_nemo=compat is None)  # fmt: skip
    assert (other - expected).norm() > 1e-3 * expected.norm(), "negative control: the two forms differ"


def test_a_checkpoint_of_nemo_becomes_ours_and_theirs_again():
    config = small(compat="nemo")
    state = random_dit(config).float().state_dict()
    theirs = to_theirs(from_state_dict(state), nemo_moviegen.entries(config)).state_dict()
    assert theirs["pos_embedder.emb_h.weight"].shape == (5, WIDTH)
    assert theirs["decoder.layers.0.mlp.linear_fc1.weight"].shape == (80, WIDTH)
    found = nemo_moviegen.config_from_shapes({name: tuple(tensor.shape) for name, tensor in theirs.items()})
    assert found == config
    ours = to_ours(from_state_dict(theirs), nemo_moviegen.entries(config), config).state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in state.items()) and set(ours) == set(state)


def test_positions_are_added_as_they_are_and_a_larger_grid_is_refused():
    dit = random_dit(small())
    with torch.no_grad():
        for axis in (dit.positions.time, dit.positions.height, dit.positions.width):
            axis.zero_()
        dit.positions.width[2] = 7.0
        found = dit.positions(torch.tensor([[0, 0, 1], [0, 0, 2]]))
    assert found[0].abs().max() == 0 and (found[1] == 7).all()
    conditioning = Conditioning(torch.zeros(1, 1, TEXT), torch.zeros(1).long(), torch.ones(1))
    with pytest.raises(ValueError, match="1x6x4 tokens"):
        dit(torch.zeros(1, 16, 1, 12, 8).double(), torch.zeros(1), conditioning)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_query_groups": 5}, "model.num_query_groups=5 does not divide model.num_attention_heads=16"),
        ({"learned_positions": None}, "needs model.learned_positions"),
        ({"family": "dit", "compat": "nemo"}, "does not go with model.family=dit, only model.family=moviegen"),
    ],
)
def test_impossible_values_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        replace(small(), **values)
