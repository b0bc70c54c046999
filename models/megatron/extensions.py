"""Libraries for GPUs that Megatron knows and may lack; asked for by a run before it starts, and without Megatron."""

from importlib.util import find_spec

import torch

from megadit.models.attention import has_varlen_attention
from megadit.models.shared.errors import UserError


def has_transformer_engine() -> bool:
    """Whether TransformerEngine is installed and a GPU is there to run it."""
    return torch.cuda.is_available() and find_spec("transformer_engine") is not None


def check_transformer_engine() -> None:
    """Raises UserError if there is no TransformerEngine, or no GPU."""
    if not has_transformer_engine():
        raise UserError(
            "parallel.transformer_impl=transformer_engine needs a GPU and TransformerEngine (megadit[te]); "
            "parallel.transformer_impl=local uses Megatron's linears"
        )


def check_gradient_accumulation_fusion() -> None:
    """Raises UserError if Megatron's own linears cannot add gradients to their sums in the product that makes them."""
    if not torch.cuda.is_available() or find_spec("fused_weight_gradient_mlp_cuda") is None:
        raise UserError(
            "parallel.gradient_accumulation_fusion=true needs a GPU and the module fused_weight_gradient_mlp_cuda of "
            "NVIDIA's apex (built with --cuda_ext), or parallel.transformer_impl=transformer_engine; leave it out"
        )


def check_cuda_graphs() -> None:
    """Raises UserError if blocks cannot be recorded, for want of the one kernel that reads segments from tensors."""
    if not torch.cuda.is_available() or not has_varlen_attention():
        raise UserError(
            "parallel.cuda_graph_max_segments needs a GPU (Ampere or newer) and torch 2.10 with its attention of "
            "variable length; leave it out"
        )
