"""Cosmos-1.0 (Predict1) text-to-world and Predict2 text-to-image, video-to-world of both, and Predict2.5: names in
diffusers' `CosmosTransformer3DModel`, and the released ones.

(arXiv 2501.03575, section 5.2.1; the names are those of the published checkpoints.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megadit.models.configs.config import DiTConfig
from megadit.models.convert.tensor_map import (
    Entry,
    attention_width,
    fuse_heads,
    input_patches,
    permute_axis,
    rename,
    renamed,
    stack_rows,
)
from megadit.models.shared.errors import UserError
from megadit.models.storage.tensor_source import renamed_by

DIFFUSERS_CLASS = "CosmosTransformer3DModel"
SETTINGS = {
    "in_channels", "out_channels", "num_attention_heads", "attention_head_dim", "num_layers", "mlp_ratio",
    "text_embed_dim", "adaln_lora_dim", "max_size", "patch_size", "rope_scale", "concat_padding_mask",
    "extra_pos_embed_type", "use_crossattn_projection", "crossattn_proj_in_channels", "encoder_hidden_states_channels",
    "controlnet_block_every_n", "img_context_dim_in", "img_context_num_tokens", "img_context_dim_out",
}  # fmt: skip
"""Known settings of diffusers' config.json; unknown ones of newer versions may mean another network."""
WITHOUT_EFFECT = {
    *("img_context_num_tokens", "img_context_dim_out"),  # image inputs of Transfer
    *("crossattn_proj_in_channels", "encoder_hidden_states_channels"),  # determined by tensors
}  # fmt: skip
IGNORED = r"(logvar|pos_embedder|accum_)|_extra_state$|(^|\.)net\.(logvar|pos_embedder|accum_)"
"""Tensors of a released checkpoint that only training uses."""
CONDITIONING_SIGMA = {True: 0.001, False: 0.0001}
"""Whether positions are learned -> noise level of conditioning latents: `augment_sigma` in 1.0; `sigma_conditioning` in
Predict2; in 2.5 `conditional_frame_timestep`, a t whose sigma is 1e-8 larger."""
TEXT_PROJECTION = {"weight": "crossattn_proj.0.weight", "bias": "crossattn_proj.0.bias"}
"""Our names -> released names (also diffusers') of Predict2.5's projection of Qwen2.5-VL's states; here it belongs to
the text encoder."""
PROJECTION = r"^crossattn_proj\."
"""Pattern of the projection's names; Predict2 has none."""
QK_EPSILON = 1e-5
"""Epsilon of queries' and keys' norms in diffusers, independent of its other norms."""


def config_from_diffusers(values: Mapping[str, Any]) -> DiTConfig:
    """Convert the configuration of diffusers' config.json.

    Raises:
        UserError: for a network of this class with unsupported components (Transfer).
    """
    for name in ("controlnet_block_every_n", "img_context_dim_in"):
        if values.get(name):
            raise UserError(
                f"{DIFFUSERS_CLASS} with {name}={values[name]} is not supported: only Cosmos 1.0, Predict2 and 2.5 are"
            )
    channels, out_channels = values["in_channels"], values["out_channels"]
    if channels not in (out_channels, out_channels + 1):
        raise UserError(
            f"in_channels={channels} does not fit out_channels={out_channels}: it must be the same, or one more for "
            "the conditioning mask"
        )
    patch_temporal, patch_spatial, patch_width = values["patch_size"]
    if patch_spatial != patch_width:
        raise UserError(f"patch_size={list(values['patch_size'])} is not square")
    sizes = [size // patch for size, patch in zip(values["max_size"], values["patch_size"], strict=True)]
    width = attention_width(values)
    has_positions = values["extra_pos_embed_type"] == "learnable"
    fields = {
        "conditioning_mode": "augmented" if has_positions else "marked",
        "conditioning_sigma": CONDITIONING_SIGMA[has_positions],
    }
    return DiTConfig(
        family="cosmos",
        compat="predict2_5" if values.get("use_crossattn_projection") else None,
        # Predict2 dropped learned positions and EDM together; no setting names the parameterization
        parameterization="edm" if has_positions else "flow",
        sigma_data=0.5 if has_positions else 1.0,
        num_layers=values["num_layers"],
        hidden_size=width,
        num_attention_heads=values["num_attention_heads"],
        ffn_hidden_size=int(width * float(values["mlp_ratio"])),
        in_channels=out_channels,
        patch_spatial=patch_spatial,
        patch_temporal=patch_temporal,
        crossattn_emb_size=values["text_embed_dim"],
        rope_scale=tuple(map(float, values["rope_scale"])),
        learned_positions=tuple(sizes) if has_positions else None,
        adaln_lora_dim=values["adaln_lora_dim"],
        padding_mask_channel=values["concat_padding_mask"],
        qk_layernorm_epsilon=QK_EPSILON,
        **(fields if channels > out_channels else {}),
    )


def config_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> DiTConfig:
    """Derive the configuration of a released Cosmos 1.0: 7B and 14B differ in width, depth and rope scale."""
    width = shapes["affline_norm.weight"][0]
    head_dim = shapes["blocks.block0.blocks.0.block.attn.to_q.1.weight"][0]
    rows = shapes["final_layer.linear.weight"][0]
    layers = {name.split(".")[1] for name in shapes if name.startswith("blocks.block")}
    columns = shapes["x_embedder.proj.1.weight"][1]
    sizes = [shapes.get(f"extra_pos_embedder.pos_emb_{axis}", (0,))[0] for axis in "thw"]
    return config_from_diffusers(
        {
            "in_channels": columns // 4 - (columns > rows),
            "out_channels": rows // 4,
            "num_attention_heads": width // head_dim,
            "attention_head_dim": head_dim,
            "num_layers": len(layers),
            "mlp_ratio": shapes["blocks.block0.blocks.2.block.layer1.weight"][0] / width,
            "text_embed_dim": shapes["blocks.block0.blocks.1.block.attn.to_k.0.weight"][1],
            "adaln_lora_dim": shapes["final_layer.adaLN_modulation.1.weight"][0],
            "max_size": (sizes[0], 2 * sizes[1], 2 * sizes[2]),
            "patch_size": (1, 2, 2),
            "rope_scale": (2.0, 2.0, 2.0) if width == 5120 else (2.0, 1.0, 1.0),
            "concat_padding_mask": columns > rows,
            "extra_pos_embed_type": "learnable" if all(sizes) else None,
        }
    )


def predict2_config_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> DiTConfig:
    """Derive the configuration of a released Predict2 (text-to-image, video-to-world) or Predict2.5, 2B or 14B."""
    width, block = shapes["t_embedding_norm.weight"][0], "blocks.0"
    head_dim, rows = shapes[f"{block}.self_attn.q_norm.weight"][0], shapes["final_layer.linear.weight"][0]
    channels = shapes["x_embedder.proj.1.weight"][1] // 4 - 1
    reads_states = TEXT_PROJECTION["weight"] in shapes
    of_videos = (20 / 24, 2.0, 2.0) if width == 5120 and not reads_states else (1.0, 3.0, 3.0)
    return config_from_diffusers(
        {
            "in_channels": channels,
            "out_channels": rows // 4,
            "num_attention_heads": width // head_dim,
            "attention_head_dim": head_dim,
            "num_layers": len({name.split(".")[1] for name in shapes if name.startswith("blocks.")}),
            "mlp_ratio": shapes[f"{block}.mlp.layer1.weight"][0] / width,
            "text_embed_dim": shapes[f"{block}.cross_attn.k_proj.weight"][1],
            "adaln_lora_dim": shapes["final_layer.adaln_modulation.1.weight"][0],
            "max_size": (128, 240, 240),
            "patch_size": (1, 2, 2),
            "rope_scale": of_videos if channels > rows // 4 else (1.0, 4.0, 4.0),
            "concat_padding_mask": True,
            "extra_pos_embed_type": None,
            "use_crossattn_projection": reads_states,
        }
    )


def config_to_diffusers(config: DiTConfig) -> dict[str, Any]:
    """The inverse of `config_from_diffusers`; without learned positions `max_size` is large, as any size works."""
    patch = (config.patch_temporal, config.patch_spatial, config.patch_spatial)
    grid = config.learned_positions or (128, 120, 120)
    return {
        "_class_name": DIFFUSERS_CLASS,
        "in_channels": config.in_channels + config.conditioning_channels,
        "out_channels": config.in_channels,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_dim": config.dim_per_head,
        "num_layers": config.num_layers,
        "mlp_ratio": config.mlp_size / config.hidden_size,
        "text_embed_dim": config.crossattn_emb_size,
        "adaln_lora_dim": config.adaln_lora_dim,
        "max_size": [size * side for size, side in zip(grid, patch, strict=True)],
        "patch_size": list(patch),
        "rope_scale": list(config.rope_scale),
        "concat_padding_mask": config.padding_mask_channel,
        "extra_pos_embed_type": "learnable" if config.learned_positions else None,
    }


def projection_to_diffusers(projection: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and tensors of the text projection in diffusers' network; empty without one (`TEXT_PROJECTION`)."""
    if not projection:
        return {}, {}
    width, states = projection["weight"].shape
    sizes = {"crossattn_proj_in_channels": states, "encoder_hidden_states_channels": width}
    return {"use_crossattn_projection": True, **sizes}, {TEXT_PROJECTION[name]: projection[name] for name in projection}


def diffusers_entries(config: DiTConfig) -> list[Entry]:
    entries = [
        input_patches("x_embedder.weight", "patch_embed.proj.weight", config),
        rename("sigma_embedder.layernorm.weight", "time_embed.norm.weight"),
        rename("shared_embedder.linear_1.weight", "time_embed.t_embedder.linear_1.weight"),
        rename("shared_embedder.linear_2.weight", "time_embed.t_embedder.linear_2.weight"),
        rename("final_layer.modulation.down.weight", "norm_out.linear_1.weight"),
        rename("final_layer.modulation.up.0.weight", "norm_out.linear_2.weight"),
        permute_axis(
            "final_layer.linear.weight",
            "proj_out.weight",
            "(ph pw pt C) D -> (pt ph pw C) D",
            config,
            channels=config.in_channels,
        ),
    ]
    if config.learned_positions is not None:
        axes = {"time": "t", "height": "h", "width": "w"}
        entries += [rename(f"positions.{name}", f"learnable_pos_embed.pos_emb_{axis}") for name, axis in axes.items()]
    for index in range(config.num_layers):
        entries += _block_entries(f"blocks.{index}", f"transformer_blocks.{index}", config.dim_per_head)
    return entries


def _block_entries(ours: str, theirs: str, head_dim: int) -> list[Entry]:
    entries = [
        stack_rows(f"{ours}.modulation.down.weight", [f"{theirs}.norm{i}.linear_1.weight" for i in (1, 2, 3)]),
        *(rename(f"{ours}.modulation.up.{i}.weight", f"{theirs}.norm{i + 1}.linear_2.weight") for i in range(3)),
        fuse_heads(
            f"{ours}.self_attention.qkv.weight", [f"{theirs}.attn1.to_{x}.weight" for x in ("q", "k", "v")], head_dim
        ),
        rename(f"{ours}.cross_attention.q.weight", f"{theirs}.attn2.to_q.weight"),
        fuse_heads(
            f"{ours}.cross_attention.kv.weight", [f"{theirs}.attn2.to_{x}.weight" for x in ("k", "v")], head_dim
        ),
        rename(f"{ours}.mlp.fc1.weight", f"{theirs}.ff.net.0.proj.weight"),
        rename(f"{ours}.mlp.fc2.weight", f"{theirs}.ff.net.2.weight"),
    ]
    for attention, number in (("self_attention", 1), ("cross_attention", 2)):
        entries.append(rename(f"{ours}.{attention}.proj.weight", f"{theirs}.attn{number}.to_out.0.weight"))
        for x in ("q", "k"):
            entries.append(rename(f"{ours}.{attention}.{x}_layernorm.weight", f"{theirs}.attn{number}.norm_{x}.weight"))
    return entries


_RELEASED_NAMES = (
    (r"^patch_embed\.proj", "x_embedder.proj.1"),
    (r"^time_embed\.t_embedder", "t_embedder.1"),
    (r"^time_embed\.norm", "affline_norm"),
    (r"^learnable_pos_embed", "extra_pos_embedder"),
    (r"^norm_out\.linear_", "final_layer.adaLN_modulation."),
    (r"^proj_out", "final_layer.linear"),
    (r"^transformer_blocks\.(\d+)", r"blocks.block\1"),
    (r"\.norm([123])\.linear_", lambda match: f".blocks.{int(match[1]) - 1}.adaLN_modulation."),
    (r"\.attn([12])\.", lambda match: f".blocks.{int(match[1]) - 1}.block.attn."),
    (r"\.to_([qkv])\.", r".to_\1.0."),
    (r"\.norm_([qk])\.", r".to_\1.1."),
    (r"\.ff\.net\.0\.proj", ".blocks.2.block.layer1"),
    (r"\.ff\.net\.2", ".blocks.2.block.layer2"),
)


_RELEASED_NAMES_2 = (
    (r"^patch_embed\.proj", "x_embedder.proj.1"),
    (r"^time_embed\.t_embedder", "t_embedder.1"),
    (r"^time_embed\.norm", "t_embedding_norm"),
    (r"^norm_out\.linear_", "final_layer.adaln_modulation."),
    (r"^proj_out", "final_layer.linear"),
    (r"^transformer_blocks", "blocks"),
    (r"\.norm1\.linear_", ".adaln_modulation_self_attn."),
    (r"\.norm2\.linear_", ".adaln_modulation_cross_attn."),
    (r"\.norm3\.linear_", ".adaln_modulation_mlp."),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_([qkv])\.", r".\1_proj."),
    (r"\.to_out\.0\.", ".output_proj."),
    (r"\.norm_([qk])\.", r".\1_norm."),
    (r"\.ff\.net\.0\.proj", ".mlp.layer1"),
    (r"\.ff\.net\.2", ".mlp.layer2"),
)


def released_name(diffusers_name: str, names: Sequence[tuple[str, Any]] = _RELEASED_NAMES) -> str:
    """The name in the released `model.pt`, without its prefix `net.`; `names` are those of the release."""
    return renamed_by(names, diffusers_name)


def released_entries(config: DiTConfig) -> list[Entry]:
    names = _RELEASED_NAMES_2 if config.parameterization == "flow" else _RELEASED_NAMES
    return renamed(diffusers_entries(config), lambda name: released_name(name, names))
