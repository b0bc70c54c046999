"""CLIP (arXiv 2103.00020) in transformers: `CLIPModel`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megadit.models.configs.config import DiTConfig, TextTowerConfig
from megadit.models.convert.tensor_map import Entry, encoder_block, permute_axis, rename, rename_linear
from megadit.models.convert.vit import PREPROCESSOR, read_preprocessor
from megadit.models.networks.clip import text_config
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json
from megadit.models.text_encoders import TextEncoder
from megadit.models.text_encoders.token_ids import WORDS_FILE
from megadit.models.tokenizers import HaarTokenizer
from megadit.models.tokenizers.haar import LinearBasis

MODEL_TYPE = "clip"
IGNORED = r"\.position_ids$"
"""Pattern of position ids in older files; ignored."""
MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Normalisation of pixels in [0, 1]: OpenAI's statistics, which all published CLIPs use."""
_OF_TEXT = {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "intermediate_size": 2048}
_OF_IMAGES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_OF_BOTH = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
"""Defaults that transformers leaves out of config.json: of the text tower, of the image tower, and of both."""


def config_from_transformers(values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> DiTConfig:
    """Convert the configuration of transformers' config.json.

    Raises:
        UserError: for a network of this type with another structure than the published ones.
    """
    text = {**_OF_TEXT, **_OF_BOTH, **values["text_config"]}
    image = {**_OF_IMAGES, **_OF_BOTH, **values["vision_config"]}
    for name in _OF_BOTH:
        if text[name] != image[name]:
            raise UserError(f"a CLIP whose towers differ in {name} ({text[name]!r}, {image[name]!r}) is not supported")
    if image["hidden_act"] not in ("quick_gelu", "gelu"):
        raise UserError(f"a CLIP with hidden_act={image['hidden_act']!r} is not supported: only quick_gelu and gelu")
    side = image.get("image_size", 224) // image.get("patch_size", 32)
    return DiTConfig(
        family="clip",
        **_sizes(image),
        in_channels=image.get("num_channels", 3),
        patch_spatial=image.get("patch_size", 32),
        position_embedding="learned",
        learned_positions=(1, side, side),
        crossattn_emb_size=2,
        sigma_data=1.0,
        qk_layernorm=False,
        layernorm_epsilon=image["layer_norm_eps"],
        quick_gelu=image["hidden_act"] == "quick_gelu",
        text_tower=TextTowerConfig(
            **_sizes(text),
            num_words=text.get("vocab_size", 49_408),
            max_length=text.get("max_position_embeddings", 77),
            embedding_size=values.get("projection_dim", 512),
        ),
    )


def _sizes(values: Mapping[str, Any]) -> dict[str, int | None]:
    width, inner = values["hidden_size"], values["intermediate_size"]
    return {
        "num_layers": values["num_hidden_layers"],
        "hidden_size": width,
        "num_attention_heads": values["num_attention_heads"],
        "ffn_hidden_size": None if inner == 4 * width else inner,
    }


def config_to_transformers(config: DiTConfig, words: TextEncoder) -> dict[str, Any]:
    """The inverse of `config_from_transformers`.

    Raises:
        UserError: for a network that transformers lacks: for clips, not square, or with SigLIP's offset.
    """
    frames, height, width = config.learned_positions
    if frames * config.patch_temporal != 1 or height != width:
        raise UserError(f"transformers' CLIP sees square images, not {frames}x{height}x{width} patches")
    text = config.text_tower
    if text.pairwise:
        raise UserError("transformers' CLIP has no offset of scores, which model.text_tower.pairwise=true learns")
    first, last = words.tokens([""])[0][0].tolist()
    both = {"hidden_act": "quick_gelu" if config.quick_gelu else "gelu", "layer_norm_eps": config.layernorm_epsilon}
    both["projection_dim"] = text.embedding_size
    return {
        "architectures": ["CLIPModel"],
        "model_type": MODEL_TYPE,
        "projection_dim": text.embedding_size,
        "text_config": {
            "model_type": "clip_text_model",
            **_their_sizes(text_config(config)),
            **both,
            "vocab_size": text.num_words,
            "max_position_embeddings": text.max_length,
            "bos_token_id": first,
            "eos_token_id": last,
            "pad_token_id": last,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            **_their_sizes(config),
            **both,
            "num_channels": config.in_channels,
            "image_size": height * config.patch_spatial,
            "patch_size": config.patch_spatial,
        },
    }


def _their_sizes(config: DiTConfig) -> dict[str, int]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
    }


def pixels_of(directory: Path) -> HaarTokenizer:
    """Tokenizer for pixels with the mean and standard deviation of a checkpoint's training."""
    path = directory / PREPROCESSOR
    values = read_preprocessor(path)
    settings = {"image_mean": values.get("image_mean", MEAN), "image_std": values.get("image_std", DEVIATION)}
    for name, numbers in settings.items():
        is_list = isinstance(numbers, list | tuple) and len(numbers) == 3
        if not (is_list and all(isinstance(each, int | float) and math.isfinite(each) for each in numbers)):
            raise UserError(f"{path}: {name}={numbers!r:.60} must be three numbers, one for each colour")
    if not min(settings["image_std"]) > 0:
        raise UserError(f"{path}: image_std={settings['image_std']!r:.60} must be greater than 0")
    mean, deviation = (torch.tensor(numbers, dtype=torch.float32) for numbers in settings.values())
    basis = LinearBasis(mean_R=2 * mean - 1, basis_RC=torch.eye(3), scale_C=2 * deviation)
    return HaarTokenizer(temporal_compression=1, spatial_compression=1, sigma_data=1.0, pca=basis)


def write_processor(directory: Path, config: DiTConfig, tokenizer: HaarTokenizer, words: TextEncoder) -> None:
    """Write the files of transformers' `CLIPProcessor`: image processor and tokenizer."""
    side = config.learned_positions[1] * config.patch_spatial
    mean, deviation = torch.zeros(3), torch.ones(3)
    if tokenizer.pca is not None:
        mean, deviation = tokenizer.pca.mean_R, tokenizer.pca.scale_C
    write_json(
        directory / PREPROCESSOR,
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"height": side, "width": side},
            "crop_size": {"height": side, "width": side},
            "image_mean": [round(value, 7) for value in ((mean + 1) / 2).tolist()],
            "image_std": [round(value, 7) for value in (deviation / 2).tolist()],
        },
    )
    (directory / WORDS_FILE).write_text(words.words, encoding="utf-8")


def entries(config: DiTConfig) -> list[Entry]:
    """Map of a network's tensors to transformers' names."""
    images, texts = "vision_model.embeddings", "text_model.embeddings"
    embedder, patches = "image_tower.x_embedder", f"{images}.patch_embedding.weight"
    pattern = "D C ph pw -> D (ph pw C)"
    return [
        Entry("log_scale", ("logit_scale",), lambda parts: parts[0].reshape(1), lambda whole: (whole.reshape(()),)),
        permute_axis(f"{embedder}.linear.weight", patches, pattern, config, channels=config.in_channels),
        rename(f"{embedder}.class_token", f"{images}.class_embedding"),
        rename(f"{embedder}.positions", f"{images}.position_embedding.weight"),
        *rename_linear(f"{embedder}.layernorm", "vision_model.pre_layrnorm", bias=True),
        *rename_linear("image_tower.head.layernorm", "vision_model.post_layernorm", bias=True),
        rename("image_tower.head.linear.weight", "visual_projection.weight"),
        rename("text_tower.x_embedder.words", f"{texts}.token_embedding.weight"),
        rename("text_tower.x_embedder.positions", f"{texts}.position_embedding.weight"),
        *rename_linear("text_tower.head.layernorm", "text_model.final_layer_norm", bias=True),
        rename("text_tower.head.linear.weight", "text_projection.weight"),
        *_blocks("image_tower", "vision_model", config),
        *_blocks("text_tower", "text_model", text_config(config)),
    ]


def _blocks(ours: str, theirs: str, config: DiTConfig) -> list[Entry]:
    found = []
    for i in range(config.num_layers):
        block, layer = f"{ours}.blocks.{i}", f"{theirs}.encoder.layers.{i}"
        found += encoder_block(block, layer, _PROJECTIONS, _LAYER, config.dim_per_head)
    return found


_PROJECTIONS = tuple(f"self_attn.{x}_proj" for x in "qkv")
_LAYER = {
    "attention_layernorm": "layer_norm1",
    "self_attention.proj": "self_attn.out_proj",
    "mlp_layernorm": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
