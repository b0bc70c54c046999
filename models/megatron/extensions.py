"""Libraries for GPUs that Megatron knows and may lack; asked for by a run before it starts, and without Megatron."""

from importlib.util import find_spec

import torch

from megadit.models.ops.attention import has_varlen_attention


def has_transformer_engine() -> bool:
    """Whether TransformerEngine is installed and a GPU is there to run it."""
    return torch.cuda.is_available() and find_spec("transformer_engine") is not None


def has_gradient_accumulation_fusion() -> bool:
    """Whether Megatron's own linears can add gradients to their sums in the product that makes them."""
    return torch.cuda.is_available() and find_spec("fused_weight_gradient_mlp_cuda") is not None


def has_cuda_graphs() -> bool:
    """Whether blocks can be recorded: a GPU, and the one kernel that reads segments from tensors."""
    return torch.cuda.is_available() and has_varlen_attention()
