"""Wan 2.1 and 2.2, text-to-video and image-to-video (arXiv 2503.20314): names in diffusers' `WanTransformer3DModel`,
and the released ones.

Their rotary positions rotate neighbouring channels, ours channels half a head apart: queries, keys and the weights of
their norms are reordered (`tensor_map.turned`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megadit.models.configs.config import DiTConfig
from megadit.models.convert.tensor_map import (
    Entry,
    attention_width,
    flattened,
    fuse_heads,
    input_patches,
    rename,
    rename_linear,
    renamed,
    turned,
)
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.storage.tensor_source import renamed_by

DIFFUSERS_CLASS = "WanTransformer3DModel"
SETTINGS = {
    "patch_size", "num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "text_dim", "freq_dim",
    "ffn_dim", "num_layers", "cross_attn_norm", "qk_norm", "eps", "image_dim", "added_kv_proj_dim", "rope_max_seq_len",
    "pos_embed_seq_len",
}  # fmt: skip
"""Known settings of diffusers' config.json; unknown ones of newer versions may mean another network."""
WITHOUT_EFFECT = {"rope_max_seq_len", "pos_embed_seq_len"}
"""Settings that only limit sizes, or concern the positions of an image in networks that read none."""
HEAD_DIM = 128
"""Head dimension of all published sizes, which the tensors do not determine."""
EPSILON = 1e-6
MODEL_TYPES = ("t2v", "i2v", "flf2v", "ti2v")
"""Supported values of `model_type` in a released config.json."""
_FIXED = {
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "freq_dim": 256,
}
"""Structural settings with their values in all published networks."""
FRAMES_OF_LATENT = 4
"""Pixel frames of a latent; each has its own mask channel in image-to-video."""
CHANNELS_OF_2_2 = 48
"""Latent channels of Wan 2.2's own autoencoder, whose only network reads a first frame as tokens."""
BOUNDARY = {"tokens": 0.875, "channels": 0.9}
"""Conditioning mode -> noise level t from which Wan 2.2 uses the high-noise expert."""
IGNORED = r"\.norm_added_q\."
"""Tensors of diffusers' image-to-video files that no diffusers version reads."""


def config_from_diffusers(values: Mapping[str, Any]) -> DiTConfig:
    """Convert the configuration of diffusers' config.json.

    Raises:
        UserError: for a network of this class with unsupported components (those built on image-to-video).
    """
    for name, only in _FIXED.items():
        if values.get(name, only) != only:
            raise UserError(f"{DIFFUSERS_CLASS} with {name}={values[name]} is not supported")
    channels, out_channels = values["in_channels"], values["out_channels"] or values["in_channels"]
    if channels not in (out_channels, 2 * out_channels + FRAMES_OF_LATENT):
        raise UserError(
            f"in_channels={channels} but out_channels={out_channels}: only text- and image-to-video are supported"
        )
    image_size, of_keys = values.get("image_dim"), values.get("added_kv_proj_dim")
    width = attention_width(values)
    if of_keys != (None if image_size is None else width):
        raise UserError(
            f"{DIFFUSERS_CLASS} with image_dim={image_size} and added_kv_proj_dim={of_keys} is not supported"
        )
    patch_temporal, patch_spatial, patch_width = values["patch_size"]
    if patch_spatial != patch_width:
        raise UserError(f"patch_size={list(values['patch_size'])} is not square")
    has_channels = channels > out_channels
    return DiTConfig(
        family="wan",
        parameterization="flow",
        sigma_data=1.0,
        num_layers=values["num_layers"],
        hidden_size=width,
        num_attention_heads=values["num_attention_heads"],
        ffn_hidden_size=values["ffn_dim"],
        in_channels=out_channels,
        patch_spatial=patch_spatial,
        patch_temporal=patch_temporal,
        crossattn_emb_size=values["text_dim"],
        layernorm_epsilon=values["eps"],
        conditioning_mode="channels" if has_channels else "tokens",
        conditioning_sigma=0.0 if has_channels or out_channels == CHANNELS_OF_2_2 else None,
        image_size=image_size,
        image_positions=None if image_size is None else values.get("pos_embed_seq_len"),
    )


def config_to_diffusers(config: DiTConfig) -> dict[str, Any]:
    """The inverse of `config_from_diffusers`; positions beyond the published 1024 per axis are allowed."""
    return {
        "_class_name": DIFFUSERS_CLASS,
        **_FIXED,
        "patch_size": [config.patch_temporal, config.patch_spatial, config.patch_spatial],
        "num_attention_heads": config.num_attention_heads,
        "attention_head_dim": config.dim_per_head,
        "in_channels": config.in_channels + config.conditioning_channels,
        "out_channels": config.in_channels,
        "text_dim": config.crossattn_emb_size,
        "ffn_dim": config.mlp_size,
        "num_layers": config.num_layers,
        "eps": config.layernorm_epsilon,
        "image_dim": config.image_size,
        "added_kv_proj_dim": None if config.image_size is None else config.hidden_size,
        "pos_embed_seq_len": config.image_positions,
        "rope_max_seq_len": 1024,
    }


def diffusers_entries(config: DiTConfig) -> list[Entry]:
    embedder = "condition_embedder"
    entries = [
        input_patches("x_embedder.weight", "patch_embedding.weight", config, is_conv=True),
        rename("x_embedder.bias", "patch_embedding.bias"),
        *rename_linear("shared_modulation.linear", f"{embedder}.time_proj", bias=True),
        flattened("final_layer.modulation.table", "scale_shift_table", (1, 2)),
        *rename_linear("final_layer.linear", "proj_out", bias=True),
    ]
    for ours, theirs in (("sigma_embedder", "time_embedder"), ("text_embedder", "text_embedder")):
        for number in (1, 2):
            entries += rename_linear(f"{ours}.linear_{number}", f"{embedder}.{theirs}.linear_{number}", bias=True)
    if config.image_size is not None:
        entries += _image_entries(config, f"{embedder}.image_embedder")
    for index in range(config.num_layers):
        entries += _block_entries(f"blocks.{index}", config.dim_per_head)
    return entries


def _image_entries(config: DiTConfig, theirs: str) -> list[Entry]:
    """Map of the tensors for image features: their embedding, and the keys and values of every block."""
    names = {
        "input_layernorm": "norm1",
        "linear_1": "ff.net.0.proj",
        "linear_2": "ff.net.2",
        "layernorm": "norm2",
    }
    entries = [
        entry
        for ours, name in names.items()
        for entry in rename_linear(f"image_embedder.{ours}", f"{theirs}.{name}", bias=True)
    ]
    if config.image_positions is not None:
        positions = rename("image_embedder.positions", f"{theirs}.pos_embed")
        entries.append(replace(positions, join=lambda parts: parts[0][0], split=lambda whole: (whole[None],)))
    for index in range(config.num_layers):
        ours, block = f"blocks.{index}.cross_attention", f"blocks.{index}.attn2"
        entries.append(rename(f"{ours}.image_k_norm.weight", f"{block}.norm_added_k.weight"))
        for kind in ("weight", "bias"):
            kv = [f"{block}.add_{x}_proj.{kind}" for x in "kv"]
            entries.append(fuse_heads(f"{ours}.image_kv.{kind}", kv, config.dim_per_head))
    return entries


def _block_entries(block: str, head_dim: int) -> list[Entry]:
    own, text = f"{block}.self_attention", f"{block}.cross_attention"
    entries = [
        flattened(f"{block}.modulation.table", f"{block}.scale_shift_table", (1, 6)),
        *rename_linear(f"{own}.proj", f"{block}.attn1.to_out.0", bias=True),
        *rename_linear(f"{text}.q", f"{block}.attn2.to_q", bias=True),
        *rename_linear(f"{text}.proj", f"{block}.attn2.to_out.0", bias=True),
        *rename_linear(f"{block}.text_layernorm", f"{block}.norm2", bias=True),
        *rename_linear(f"{block}.mlp.fc1", f"{block}.ffn.net.0.proj", bias=True),
        *rename_linear(f"{block}.mlp.fc2", f"{block}.ffn.net.2", bias=True),
    ]
    for kind in ("weight", "bias"):
        qkv, kv = ([f"{block}.{name}.{kind}" for name in names] for names in (
            ("attn1.to_q", "attn1.to_k", "attn1.to_v"), ("attn2.to_k", "attn2.to_v"),
        ))  # fmt: skip
        entries.append(turned(fuse_heads(f"{own}.qkv.{kind}", qkv, head_dim), head_dim, count=2))
        entries.append(fuse_heads(f"{text}.kv.{kind}", kv, head_dim))
    for x in "qk":
        norm = rename(f"{own}.{x}_norm.weight", f"{block}.attn1.norm_{x}.weight")
        entries.append(turned(norm, head_dim, count=1))
        entries.append(rename(f"{text}.{x}_norm.weight", f"{block}.attn2.norm_{x}.weight"))
    return entries


# ------------------------------------------------------------------------------------------------ as released

_RELEASED_NAMES = (
    (r"^condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
    (r"^condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"^condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
    (r"^condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"^condition_embedder\.time_proj", "time_projection.1"),
    (r"^condition_embedder\.image_embedder\.norm1", "img_emb.proj.0"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj", "img_emb.proj.1"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2", "img_emb.proj.3"),
    (r"^condition_embedder\.image_embedder\.norm2", "img_emb.proj.4"),
    (r"^condition_embedder\.image_embedder\.pos_embed", "img_emb.emb_pos"),
    (r"^proj_out", "head.head"),
    (r"^scale_shift_table", "head.modulation"),
    (r"\.scale_shift_table", ".modulation"),
    (r"\.norm2\.", ".norm3."),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.add_([kv])_proj\.", r".\1_img."),
    (r"\.norm_added_k\.", ".norm_k_img."),
    (r"\.ffn\.net\.0\.proj", ".ffn.0"),
    (r"\.ffn\.net\.2", ".ffn.2"),
)


def released_name(diffusers_name: str) -> str:
    """The name in the released files."""
    return renamed_by(_RELEASED_NAMES, diffusers_name)


def released_entries(config: DiTConfig) -> list[Entry]:
    return renamed(diffusers_entries(config), released_name)


_RELEASED_FIXED = {"qk_norm": True, "cross_attn_norm": True, "window_size": [-1, -1], "text_len": 512, "freq_dim": 256}
"""Released settings with their values in all published networks; 512 text tokens are attended to."""


def config_from_released(values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> DiTConfig:
    """The configuration of released tensors with the config.json next to them.

    Raises:
        UserError: as `config_from_diffusers`, and for a setting that is unknown or that the tensors contradict.
    """
    _check_released(values)
    width, heads, eps = _patches(shapes)[0], values.get("num_heads"), values.get("eps", EPSILON)
    if heads is not None and (not isinstance(heads, int) or heads < 1 or width % heads):
        raise UserError(
            f"config.json: num_heads={heads!r:.40} does not divide the width of patch_embedding.weight, {width}"
        )
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise UserError(f"config.json: eps={eps!r:.40} must be a number between 0 and 1, such as {EPSILON}")
    config = config_from_shapes(shapes, heads, eps)
    of_tensors = {
        "dim": width,
        "ffn_dim": config.mlp_size,
        "in_dim": config.in_channels + config.conditioning_channels,
        "out_dim": config.in_channels,
        "num_layers": config.num_layers,
        "text_dim": config.crossattn_emb_size,
        "patch_size": [config.patch_temporal, config.patch_spatial, config.patch_spatial],
    }
    for name, found in of_tensors.items():
        if values.get(name, found) != found:
            raise UserError(f"config.json: {name}={values[name]!r:.40}, but the tensors have {found}")
    return config


def _check_released(values: Mapping[str, Any]) -> None:
    kind = values.get("model_type", "t2v")
    choose_one(kind, MODEL_TYPES, f"config.json: model_type={kind!r:.40} is not supported")
    for name, only in _RELEASED_FIXED.items():
        if values.get(name, only) != only:
            raise UserError(f"config.json: {name}={values[name]!r:.40} is not supported: it must be {only}")
    of_tensors = {"dim", "ffn_dim", "in_dim", "out_dim", "num_layers", "text_dim", "patch_size"}
    known = {"model_type", "num_heads", "eps", *_RELEASED_FIXED, *of_tensors}
    for name in sorted(values.keys() - known):
        if not name.startswith("_"):
            raise UserError(f"config.json has the setting {name!r}, which no released Wan known to this version has")


def _patches(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    shape = shapes["patch_embedding.weight"]
    if len(shape) != 5:
        raise UserError(
            f"patch_embedding.weight has the shape {list(shape)}, not [width, channels, and sides of a patch]"
        )
    return shape


def config_from_shapes(
    shapes: Mapping[str, tuple[int, ...]], num_heads: int | None = None, eps: float = EPSILON
) -> DiTConfig:
    """The configuration of released tensors; heads are 128 wide unless their number is given.

    Raises:
        UserError: as `config_from_diffusers`.
    """
    width, channels, *patch = _patches(shapes)
    layers = {name.split(".")[1] for name in shapes if name.startswith("blocks.")}
    if num_heads is None and width % HEAD_DIM:
        raise UserError(
            f"patch_embedding.weight is {width} wide, which does not determine the number of heads (published ones are "
            f"{HEAD_DIM} wide): put the "
            'config.json of their publication next to them, {"_class_name": "WanModel", "num_heads": ..., "eps": ...}'
        )
    num_heads = num_heads or width // HEAD_DIM
    return config_from_diffusers(
        {
            "num_layers": len(layers),
            "num_attention_heads": num_heads,
            "attention_head_dim": width // num_heads,
            "in_channels": channels,
            "out_channels": shapes["head.head.weight"][0] // (patch[0] * patch[1] * patch[2]),
            "patch_size": patch,
            "text_dim": shapes["text_embedding.0.weight"][1],
            "freq_dim": shapes["time_embedding.0.weight"][1],
            "ffn_dim": shapes["blocks.0.ffn.0.weight"][0],
            "eps": eps,
            "image_dim": shapes.get("img_emb.proj.0.weight", (None,))[0],
            "added_kv_proj_dim": width if "img_emb.proj.0.weight" in shapes else None,
            "pos_embed_seq_len": shapes.get("img_emb.emb_pos", (None, None))[1],
        }
    )
