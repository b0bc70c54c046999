"""Libraries for GPUs that Megatron knows and may lack; asked for by a run before it starts, and without Megatron."""

from importlib.util import find_spec

import torch

from megadit.models.ops.attention import has_varlen_attention


def has_transformer_engine() -> bool:
    """Whether TransformerEngine is installed and a GPU is there to run it."""
    return torch.cuda.is_available() and find_spec("transformer_engine") is not None


def has_eight_bit_products() -> bool:
    """Whether torch multiplies matrices of eight bits where a run computes: a GPU that can, or this machine's CPU."""
    where = "CUDA" if torch.cuda.is_available() else "CPU"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", where)
    return has_kernel and (where == "CPU" or torch.cuda.get_device_capability() >= (8, 9))


def has_gradient_accumulation_fusion() -> bool:
    """Whether Megatron's own linears can add gradients to their sums in the product that makes them.

    By NVIDIA's apex, or by torch, whose products of half precision give float32 from 2.8 on.
    """
    has_product = find_spec("fused_weight_gradient_mlp_cuda") is not None or has_torch_product()
    return torch.cuda.is_available() and has_product


def has_torch_product() -> bool:
    """Whether torch has products of half precision with float32 sums."""
    return hasattr(torch.ops.aten.addmm, "dtype_out")


def has_cuda_graphs() -> bool:
    """Whether blocks can be recorded: a GPU, and the one kernel that reads segments from tensors."""
    return torch.cuda.is_available() and has_varlen_attention()
