"""MovieGen in NeMo's diffusion collection (`DiTLlama*Config`): family `moviegen` with `compat="nemo"`."""

import re
from collections.abc import Mapping

from megadit.models.configs.config import DiTConfig
from megadit.models.convert import nemo
from megadit.models.convert.tensor_map import Entry, rename, reorder_heads

IGNORED = r"_extra_state|^decoder\.final_layernorm"
"""Pattern of ignored tensors: TransformerEngine's extra states."""
NUM_QUERY_GROUPS = 8
"""Query groups of every published configuration; the tensors only determine the total width of the groups."""

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def config_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> DiTConfig:
    """The configuration of a checkpoint, from its tensors only (named without `module.`).

    Raises:
        UserError: if its patches span several frames.
    """
    layer = "decoder.layers.0"
    channels, patch = nemo.channels_and_patch(shapes)
    width = shapes["x_embedder.weight"][0]
    queries = shapes[f"{layer}.cross_attention.linear_q.weight"][0]
    keys = (shapes[f"{layer}.self_attention.linear_qkv.weight"][0] - queries) // 2
    head_dim = keys // NUM_QUERY_GROUPS
    return DiTConfig(
        family="moviegen",
        compat="nemo",
        num_layers=1 + max(int(match[1]) for match in map(_LAYER.match, shapes) if match),
        hidden_size=width,
        num_attention_heads=queries // head_dim,
        head_dim=head_dim,
        num_query_groups=NUM_QUERY_GROUPS,
        ffn_hidden_size=shapes[f"{layer}.mlp.linear_fc2.weight"][1],
        in_channels=channels,
        patch_spatial=patch,
        crossattn_emb_size=shapes[f"{layer}.cross_attention.linear_kv.weight"][1],
        position_embedding="learned",
        learned_positions=tuple(shapes[f"pos_embedder.emb_{axis}.weight"][0] for axis in "thw"),
        qk_layernorm=False,
        layernorm_epsilon=nemo.EPSILON,
    )


def entries(config: DiTConfig) -> list[Entry]:
    found = nemo.outer_entries(config)
    for axis in ("time", "height", "width"):
        found.append(rename(f"positions.{axis}", f"pos_embedder.emb_{axis[0]}.weight"))
    for index in range(config.num_layers):
        found += _block_entries(f"blocks.{index}", f"decoder.layers.{index}")
    return found


def _block_entries(ours: str, theirs: str) -> list[Entry]:
    """Map of the tensors of a block; Megatron lays out fused projections group by group, as we do, but SwiGLU's factors
    one after the other."""
    names = {
        "modulation.linear": "adaLN.adaLN_modulation.1",
        "attention_layernorm": "adaLN.ln",
        "self_attention.qkv": "self_attention.linear_qkv",
        "self_attention.proj": "self_attention.linear_proj",
        "cross_attention.q": "cross_attention.linear_q",
        "cross_attention.kv": "cross_attention.linear_kv",
        "cross_attention.proj": "cross_attention.linear_proj",
        "mlp.fc2": "mlp.linear_fc2",
    }
    return [
        *(rename(f"{ours}.{name}.weight", f"{theirs}.{their}.weight") for name, their in names.items()),
        reorder_heads(f"{ours}.mlp.fc1.weight", f"{theirs}.mlp.linear_fc1.weight", 1, count=2),
    ]
