"""ViT (arXiv 2010.11929) in transformers: `ViTForImageClassification`, and `ViTModel`, which has no classes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megadit.models.configs.config import DiTConfig
from megadit.models.convert.tensor_map import Entry, encoder_block, flattened, permute_axis, rename, rename_linear
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_json
from megadit.models.text_encoders import TextEncoder
from megadit.models.tokenizers import HaarTokenizer, VideoTokenizer

MODEL_TYPE = "vit"
IGNORED = r"^(vit\.)?pooler\."
"""Pattern of the pooler of `ViTModel`, which no published model has trained for classes; ignored."""
PREPROCESSOR = "preprocessor_config.json"
_MEAN_AND_STD = [0.5, 0.5, 0.5]
"""Mean and standard deviation that map pixels to [-1, 1], as our networks expect."""
_EXPECTED = {"hidden_act": "gelu", "qkv_bias": True}


def config_from_transformers(values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> DiTConfig:
    """Convert the configuration of transformers' config.json; the tensors determine whether there is a head.

    Raises:
        UserError: for a network of this type with another structure than the published ones.
    """
    for name, expected in _EXPECTED.items():
        if values.get(name, expected) != expected:
            raise UserError(f"a ViT with {name}={values[name]!r} is not supported: it must be {expected!r}")
    sides = (values["image_size"], values["patch_size"])
    if not all(isinstance(side, int) for side in sides):
        raise UserError(f"a ViT with image_size={values['image_size']!r} is not supported: images must be square")
    grid = values["image_size"] // values["patch_size"]
    width, inner = values["hidden_size"], values["intermediate_size"]
    return DiTConfig(
        family="vit",
        num_layers=values["num_hidden_layers"],
        hidden_size=width,
        num_attention_heads=values["num_attention_heads"],
        ffn_hidden_size=None if inner == 4 * width else inner,
        in_channels=values.get("num_channels", 3),
        patch_spatial=values["patch_size"],
        position_embedding="learned",
        learned_positions=(1, grid, grid),
        crossattn_emb_size=2,
        num_classes=shapes.get("classifier.weight", (None,))[0],
        qk_layernorm=False,
        layernorm_epsilon=values.get("layer_norm_eps", 1e-12),
    )


def config_to_transformers(config: DiTConfig, classes: TextEncoder) -> dict[str, Any]:
    """The inverse of `config_from_transformers`.

    Raises:
        UserError: for a network for clips, or with a grid that is not square.
    """
    frames, height, width = config.learned_positions
    if frames * config.patch_temporal != 1 or height != width:
        raise UserError(f"transformers' ViT sees square images, not {frames}x{height}x{width} patches")
    class_names = getattr(classes, "names", ())
    labels = {"id2label": dict(enumerate(class_names)), "label2id": {name: i for i, name in enumerate(class_names)}}
    return {
        "architectures": ["ViTModel" if config.num_classes is None else "ViTForImageClassification"],
        "model_type": MODEL_TYPE,
        **_EXPECTED,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.mlp_size,
        "num_channels": config.in_channels,
        "image_size": height * config.patch_spatial,
        "patch_size": config.patch_spatial,
        "layer_norm_eps": config.layernorm_epsilon,
        **({} if config.num_classes is None else labels),
    }


def read_preprocessor(path: Path) -> dict[str, Any]:
    """Read the pixel normalisation of preprocessor_config.json; {} where there is none.

    Raises:
        UserError: if pixels are not rescaled to [0, 1] and normalised.
    """
    values = read_json(path) if path.is_file() else {}
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a JSON object of settings")
    for name in ("do_rescale", "do_normalize"):
        if not values.get(name, True):
            raise UserError(f"{path}: {name}=false is not supported: our networks take normalised pixels")
    factor = values.get("rescale_factor", 1 / 255)
    if not (isinstance(factor, int | float) and abs(255 * factor - 1) <= 1e-6):
        raise UserError(f"{path}: rescale_factor={factor!r:.40} is not supported: it must be 1 / 255")
    return values


def pixels_of(directory: Path) -> HaarTokenizer:
    """Tokenizer for pixels in [-1, 1].

    Raises:
        UserError: if a checkpoint was trained on another range.
    """
    path = directory / PREPROCESSOR
    values = read_preprocessor(path)
    for name in ("image_mean", "image_std"):
        if values.get(name, _MEAN_AND_STD) != _MEAN_AND_STD:
            raise UserError(f"{path} has {name}={values[name]!r:.60}: our networks take pixels with {_MEAN_AND_STD}")
    return HaarTokenizer(temporal_compression=1, spatial_compression=1)


def write_processor(directory: Path, config: DiTConfig, tokenizer: VideoTokenizer, classes: TextEncoder) -> None:
    """Write the configuration of transformers' `ViTImageProcessor`."""
    side = config.learned_positions[1] * config.patch_spatial
    values = {"image_processor_type": "ViTImageProcessor", "size": {"height": side, "width": side}}
    write_json(directory / PREPROCESSOR, {**values, "image_mean": _MEAN_AND_STD, "image_std": _MEAN_AND_STD})


def entries(config: DiTConfig) -> list[Entry]:
    """Map of a network's tensors to transformers' names."""
    prefix = "" if config.num_classes is None else "vit."
    embeddings, width = f"{prefix}embeddings", config.hidden_size
    patches = f"{embeddings}.patch_embeddings.projection"
    pattern = "D C ph pw -> D (ph pw C)"
    found = [
        permute_axis("x_embedder.linear.weight", f"{patches}.weight", pattern, config, channels=config.in_channels),
        rename("x_embedder.linear.bias", f"{patches}.bias"),
        flattened("x_embedder.class_token", f"{embeddings}.cls_token", (1, 1)),
        Entry(
            "x_embedder.positions",
            (f"{embeddings}.position_embeddings",),
            lambda parts: parts[0].reshape(-1, width),
            lambda whole: (whole[None],),
        ),
        *rename_linear("head.layernorm", f"{prefix}layernorm", bias=True),
    ]
    if config.num_classes is not None:
        found += rename_linear("head.linear", "classifier", bias=True)
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"{prefix}encoder.layer.{i}"
        found += encoder_block(ours, theirs, _PROJECTIONS, _LAYER, config.dim_per_head)
    return found


_PROJECTIONS = tuple(f"attention.attention.{x}" for x in ("query", "key", "value"))
_LAYER = {
    "attention_layernorm": "layernorm_before",
    "self_attention.proj": "attention.output.dense",
    "mlp_layernorm": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
