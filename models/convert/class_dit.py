"""The class-conditional DiT of arXiv 2212.09748: diffusers' `DiTTransformer2DModel`, and the original checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megadit.models.configs.config import DiTConfig
from megadit.models.convert.tensor_map import (
    Entry,
    attention_width,
    copies,
    fuse_heads,
    permute_axis,
    rename,
    rename_linear,
    reorder_heads,
)
from megadit.models.shared.errors import UserError

DIFFUSERS_CLASS, LEGACY_CLASS = "DiTTransformer2DModel", "Transformer2DModel"
"""Class name in diffusers, and the shared class of older versions."""
IGNORED = r"^pos_embed$"
"""Fixed positions in the original checkpoints, which are computed here."""

SETTINGS = {
    "num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "num_layers", "dropout",
    "norm_num_groups", "attention_bias", "sample_size", "patch_size", "activation_fn", "num_embeds_ada_norm",
    "upcast_attention", "norm_type", "norm_elementwise_affine", "norm_eps",
}  # fmt: skip
"""Known settings of diffusers' config.json; unknown ones of newer versions may mean another network."""
WITHOUT_EFFECT = {"dropout", "norm_num_groups", "upcast_attention"}
"""Settings of training, of other inputs, and of precision; ignored."""

_LEGACY = {
    "cross_attention_dim": None, "num_vector_embeds": None, "caption_channels": None, "interpolation_scale": None,
    "use_additional_conditions": None, "use_linear_projection": False, "only_cross_attention": False,
    "double_self_attention": False, "attention_type": "default",
}  # fmt: skip
"""Settings of `LEGACY_CLASS` that DiT does not use, with their neutral values."""
_USUAL = {"norm_eps": 1e-5, "out_channels": None}
"""diffusers' defaults of settings that such files leave out."""

_EXPECTED = {
    "norm_type": "ada_norm_zero",
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "norm_elementwise_affine": False,
}


def from_legacy(values: Mapping[str, Any], path: Path) -> tuple[str, dict[str, Any]]:
    """Current class and settings for those of `LEGACY_CLASS`, as facebook/DiT-XL-2-256 is published.

    Raises:
        UserError: for another network of that class.
    """
    others = {name: values[name] for name, usual in _LEGACY.items() if values.get(name, usual) != usual}
    if values.get("norm_type") != _EXPECTED["norm_type"] or others:
        what = ", ".join(
            f"{name}={value!r}" for name, value in {"norm_type": values.get("norm_type"), **others}.items()
        )
        raise UserError(f"{path} holds a {LEGACY_CLASS} with {what}; of that class only DiT is read ({_EXPECTED})")
    return DIFFUSERS_CLASS, _USUAL | {name: value for name, value in values.items() if name not in _LEGACY}


def config_from_diffusers(values: Mapping[str, Any]) -> DiTConfig:
    """Convert the configuration of diffusers' config.json.

    Raises:
        UserError: for a network of this class with another structure than the published ones.
    """
    for name, expected in _EXPECTED.items():
        if values.get(name, expected) != expected:
            raise UserError(f"{DIFFUSERS_CLASS} with {name}={values[name]!r} is not supported: it must be {expected!r}")
    channels, out_channels = values["in_channels"], values["out_channels"] or values["in_channels"]
    if out_channels not in (channels, 2 * channels):
        raise UserError(f"out_channels={out_channels} is neither in_channels={channels} nor twice that")
    return DiTConfig(
        **_COMMON,
        num_layers=values["num_layers"],
        hidden_size=attention_width(values),
        num_attention_heads=values["num_attention_heads"],
        in_channels=channels,
        patch_spatial=values["patch_size"],
        num_classes=values["num_embeds_ada_norm"],
        learned_variance=out_channels == 2 * channels,
        frequency_shift=1.0,  # in diffusers; 0 in the original
        mlp_layernorm_epsilon=values["norm_eps"],
    )


_COMMON: dict[str, Any] = {
    "family": "dit",
    "crossattn_emb_size": 2,
    "position_embedding": "sincos",
    "qk_layernorm": False,
    "sigma_data": 1.0,
    "parameterization": "vp",
}


def config_from_shapes(shapes: Mapping[str, tuple[int, ...]], head_dim: int | None = None) -> DiTConfig:
    """The configuration of an original checkpoint; heads are 64 wide, 72 in XL.

    Raises:
        UserError: for a width of other heads, whose number no tensor tells.
    """
    width, channels, patch, _ = shapes["x_embedder.proj.weight"]
    num_layers = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks."))
    head_dim = head_dim or (72 if width % 72 == 0 and width % 64 == 0 and width >= 1152 else 64)
    if width % head_dim:
        raise UserError(
            f"x_embedder.proj.weight is {width} wide, which does not determine the number of heads (published ones are "
            "64 wide, 72 in XL): give diffusers' form of it, with its config.json"
        )
    out_channels = shapes["final_layer.linear.weight"][0] // patch**2
    return DiTConfig(
        **_COMMON,
        num_layers=num_layers,
        hidden_size=width,
        num_attention_heads=width // head_dim,
        in_channels=channels,
        patch_spatial=patch,
        num_classes=shapes["y_embedder.embedding_table.weight"][0] - 1,
        learned_variance=out_channels == 2 * channels,
    )


def config_to_diffusers(config: DiTConfig, sample_size: int) -> dict[str, Any]:
    """The inverse of `config_from_diffusers`; `sample_size` is the side of a latent."""
    return {
        "_class_name": DIFFUSERS_CLASS,
        **_EXPECTED,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_dim": config.dim_per_head,
        "in_channels": config.in_channels,
        "out_channels": config.in_channels * (1 + config.learned_variance),
        "num_layers": config.num_layers,
        "sample_size": sample_size,
        "patch_size": config.patch_spatial,
        "num_embeds_ada_norm": config.num_classes,
        "norm_eps": config.mlp_layernorm_epsilon or config.layernorm_epsilon,
    }


def diffusers_entries(config: DiTConfig) -> list[Entry]:
    layers = range(config.num_layers)

    def of_all_blocks(ours: str, theirs: str) -> Entry:
        return copies(ours, [f"transformer_blocks.{i}.norm1.emb.{theirs}" for i in layers])

    entries = [
        *_patch_entries("pos_embed.proj", config),
        of_all_blocks("class_embedder.weight", "class_embedder.embedding_table.weight"),
        *rename_linear("final_layer.modulation.linear", "proj_out_1", bias=True),
        *rename_linear("final_layer.linear", "proj_out_2", bias=True),
    ]
    for kind in ("weight", "bias"):
        for n in (1, 2):
            entries.append(of_all_blocks(f"sigma_embedder.linear_{n}.{kind}", f"timestep_embedder.linear_{n}.{kind}"))
    for i in layers:
        ours, theirs = f"blocks.{i}", f"transformer_blocks.{i}"
        for kind in ("weight", "bias"):
            projections = [f"{theirs}.attn1.to_{x}.{kind}" for x in ("q", "k", "v")]
            entries.append(fuse_heads(f"{ours}.self_attention.qkv.{kind}", projections, config.dim_per_head))
        entries += _linear_entries(
            ours,
            theirs,
            {
                "modulation.linear": "norm1.linear",
                "self_attention.proj": "attn1.to_out.0",
                "mlp.fc1": "ff.net.0.proj",
                "mlp.fc2": "ff.net.2",
            },
        )
    return entries


def original_entries(config: DiTConfig) -> list[Entry]:
    entries = [
        *_patch_entries("x_embedder.proj", config),
        *rename_linear("sigma_embedder.linear_1", "t_embedder.mlp.0", bias=True),
        *rename_linear("sigma_embedder.linear_2", "t_embedder.mlp.2", bias=True),
        rename("class_embedder.weight", "y_embedder.embedding_table.weight"),
        *rename_linear("final_layer.modulation.linear", "final_layer.adaLN_modulation.1", bias=True),
        *rename_linear("final_layer.linear", "final_layer.linear", bias=True),
    ]
    for i in range(config.num_layers):
        block = f"blocks.{i}"
        for kind in ("weight", "bias"):
            name = f"{block}.self_attention.qkv.{kind}"
            entries.append(reorder_heads(name, f"{block}.attn.qkv.{kind}", config.dim_per_head))
        entries += _linear_entries(
            block,
            block,
            {
                "modulation.linear": "adaLN_modulation.1",
                "self_attention.proj": "attn.proj",
                "mlp.fc1": "mlp.fc1",
                "mlp.fc2": "mlp.fc2",
            },
        )
    return entries


def _patch_entries(theirs: str, config: DiTConfig) -> list[Entry]:
    """The first layer, a convolution whose stride is its kernel size."""
    pattern = "D C ph pw -> D (ph pw C)"
    weight = permute_axis("x_embedder.weight", f"{theirs}.weight", pattern, config, channels=config.in_channels)
    return [weight, rename("x_embedder.bias", f"{theirs}.bias")]


def _linear_entries(ours: str, theirs: str, names: Mapping[str, str]) -> list[Entry]:
    found = []
    for our_name, their_name in names.items():
        found += rename_linear(f"{ours}.{our_name}", f"{theirs}.{their_name}", bias=True)
    return found
