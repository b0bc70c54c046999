"""The umT5 of Wan's original release (`models_t5_umt5-xxl-enc-bf16.pth`): its tensor names in `transformers`, and its
sizes, derived from the tensors."""

from pathlib import Path
from typing import Any

from megadit.models.storage.tensor_source import TensorSource, renamed_by

RELEASED_FILES = "models_t5_*.pth"
RELEASED_WORDS = Path("google") / "umt5-xxl"
"""Its file, and the folder of its vocabulary, in the released folder."""
_MARK = "blocks.0.ffn.gate.0.weight"
_NAMES = (
    (r"^token_embedding\.", "shared."),
    (r"^norm\.", "encoder.final_layer_norm."),
    (r"^blocks\.(\d+)\.", r"encoder.block.\1."),
    (r"\.norm1\.", ".layer.0.layer_norm."),
    (r"\.norm2\.", ".layer.1.layer_norm."),
    (r"\.attn\.([qkvo])\.", r".layer.0.SelfAttention.\1."),
    (r"\.pos_embedding\.embedding\.", ".layer.0.SelfAttention.relative_attention_bias."),
    (r"\.ffn\.gate\.0\.", ".layer.1.DenseReluDense.wi_0."),
    (r"\.ffn\.fc1\.", ".layer.1.DenseReluDense.wi_1."),
    (r"\.ffn\.fc2\.", ".layer.1.DenseReluDense.wo."),
)
_BLOCK, _ATTENTION = "encoder.block.{}.layer", "encoder.block.{}.layer.0.SelfAttention"


def from_released(source: TensorSource) -> TensorSource:
    """The tensors under transformers' names; those of other files are unchanged."""
    if _MARK not in source.stored:
        return source
    names = {renamed_by(_NAMES, name): name for name in source.stored}
    stored = {ours: source.stored[theirs] for ours, theirs in names.items()}
    return TensorSource(source.label, stored, lambda ours: source.read(names[ours]), source.metadata)


def config_from_tensors(tensors: TensorSource) -> dict[str, Any]:
    """transformers' settings of the encoder with these tensors: a umT5 (every block has positions) or a T5.

    Raises:
        KeyError: if a tensor of every such encoder is missing.
    """
    shapes = tensors.shapes
    vocabulary, width = shapes["shared.weight" if "shared.weight" in shapes else "encoder.embed_tokens.weight"]
    layers = 1 + max((int(name.split(".")[2]) for name in shapes if name.startswith("encoder.block.")), default=-1)
    buckets, heads = shapes[f"{_ATTENTION.format(0)}.relative_attention_bias.weight"]
    is_gated = f"{_BLOCK.format(0)}.1.DenseReluDense.wi_0.weight" in shapes
    has_all_positions = f"{_ATTENTION.format(1)}.relative_attention_bias.weight" in shapes
    return {
        "model_type": "umt5" if has_all_positions else "t5",
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": shapes[f"{_ATTENTION.format(0)}.q.weight"][0] // heads,
        "d_ff": shapes[f"{_BLOCK.format(0)}.1.DenseReluDense.wi{'_0' if is_gated else ''}.weight"][0],
        "num_layers": layers,
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "feed_forward_proj": "gated-gelu" if is_gated else "relu",
    }
