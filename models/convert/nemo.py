"""The cross-attention DiT of NeMo's diffusion collection, and DFM's (families `nemo` and `dfm`)."""

import re
from collections.abc import Mapping

from megadit.models.configs.config import DiTConfig
from megadit.models.convert.tensor_map import Entry, permute_axis, rename, rename_linear
from megadit.models.shared.errors import UserError

IGNORED = r"_extra_state|^pos_embedder\.pos_embedding\.weight$|^decoder\.final_layernorm"
"""Pattern of ignored tensors: TransformerEngine's extra states, and fixed positions, which are computed here."""
IGNORED_BY_DFM = IGNORED + r"|^affline_norm\.weight$"
"""A norm that DFM creates but never calls."""
EPSILON = 1e-5
"""The effective epsilon: the 1e-6 of NeMo and DFM is a class attribute without annotation, ignored by dataclasses."""

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def config_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> DiTConfig:
    """The configuration of a checkpoint, from its tensors only (named without `module.`).

    Raises:
        UserError: if its patches span several frames.
    """
    layer = "decoder.layers.0"
    channels, patch = channels_and_patch(shapes)
    width = shapes["x_embedder.weight"][0]
    (head_dim,) = shapes[f"{layer}.full_self_attention.q_layernorm.weight"]
    is_low_rank = f"{layer}.adaLN.adaLN_modulation.2.weight" in shapes
    return DiTConfig(
        family="dfm" if is_low_rank else "nemo",
        num_layers=1 + max(int(match[1]) for match in map(_LAYER.match, shapes) if match),
        hidden_size=width,
        num_attention_heads=width // head_dim,
        head_dim=head_dim,
        ffn_hidden_size=shapes[f"{layer}.mlp.linear_fc1.weight"][0],
        in_channels=channels,
        patch_spatial=patch,
        crossattn_emb_size=shapes[f"{layer}.cross_attention.linear_kv.weight"][1],
        position_embedding="sincos",
        adaln_lora_dim=shapes[f"{layer}.adaLN.adaLN_modulation.1.weight"][0] if is_low_rank else None,
        layernorm_epsilon=EPSILON,
    )


def channels_and_patch(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """(channels, patch): Cosmos' 16 channels where they divide the columns, with patches of 2 or 1; else all columns.

    Raises:
        UserError: if the patches span several frames.
    """
    columns, rows = shapes["x_embedder.weight"][1], shapes["final_layer_linear.weight"][0]
    if rows != columns:
        raise UserError(
            f"the network reads {columns} numbers a token and writes {rows}: "
            "patches of several frames cannot be converted"
        )
    for patch in (2, 1):
        if columns == 16 * patch**2:
            return 16, patch
    return (columns // 4, 2) if columns % 4 == 0 else (columns, 1)


def entries(config: DiTConfig) -> list[Entry]:
    found = outer_entries(config)
    for index in range(config.num_layers):
        found += _block_entries(f"blocks.{index}", f"decoder.layers.{index}", is_low_rank=config.family == "dfm")
    return found


def outer_entries(config: DiTConfig) -> list[Entry]:
    """Map of all tensors outside the blocks."""
    found = [
        permute_axis(
            "x_embedder.weight",
            "x_embedder.weight",
            "D (ph pw pt C) -> D (pt ph pw C)",
            config,
            channels=config.in_channels,
        ),
        rename("x_embedder.bias", "x_embedder.bias"),
        *(
            permute_axis(
                f"final_layer.linear.{kind}",
                f"final_layer_linear.{kind}",
                "(ph pw pt C) ... -> (pt ph pw C) ...",
                config,
                channels=config.in_channels,
            )
            for kind in ("weight", "bias")
        ),
    ]
    for embedder, theirs in (("sigma_embedder", "t_embedder.1"), ("fps_embedder", "fps_embedder.1")):
        for n in (1, 2):
            found += rename_linear(f"{embedder}.linear_{n}", f"{theirs}.linear_{n}", bias=True)
    if config.structure.condition_layernorm:
        found.append(rename("condition_layernorm.weight", "affline_norm.weight"))
    return found


def _block_entries(ours: str, theirs: str, *, is_low_rank: bool) -> list[Entry]:
    """Map of the tensors of a block; Megatron lays out fused projections head by head, as we do."""
    modulation = ("modulation.down", "modulation.up.0") if is_low_rank else ("modulation.linear",)
    names = {name: f"adaLN.adaLN_modulation.{i}" for i, name in enumerate(modulation, start=1)}
    names |= {
        "self_attention.qkv": "full_self_attention.linear_qkv",
        "self_attention.proj": "full_self_attention.linear_proj",
        "self_attention.q_layernorm": "full_self_attention.q_layernorm",
        "self_attention.k_layernorm": "full_self_attention.k_layernorm",
        "cross_attention.q": "cross_attention.linear_q",
        "cross_attention.kv": "cross_attention.linear_kv",
        "cross_attention.proj": "cross_attention.linear_proj",
        "cross_attention.q_layernorm": "cross_attention.q_layernorm",
        "cross_attention.k_layernorm": "cross_attention.k_layernorm",
        "mlp.fc1": "mlp.linear_fc1",
        "mlp.fc2": "mlp.linear_fc2",
    }
    return [rename(f"{ours}.{name}.weight", f"{theirs}.{their}.weight") for name, their in names.items()]
