"""Checks for optional GPU libraries of Megatron, before a run starts and without importing Megatron."""

from importlib.util import find_spec

import torch

from megadit.models.ops.attention import has_varlen_attention


def has_transformer_engine() -> bool:
    """Whether TransformerEngine is installed and there is a GPU."""
    return torch.cuda.is_available() and find_spec("transformer_engine") is not None


def has_eight_bit_products() -> bool:
    """Whether torch supports 8-bit matrix products on the run's device: a GPU that can, or this machine's CPU."""
    where = "CUDA" if torch.cuda.is_available() else "CPU"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", where)
    return has_kernel and (where == "CPU" or torch.cuda.get_device_capability() >= (8, 9))


def has_gradient_accumulation_fusion() -> bool:
    """Whether Megatron's own linears can fuse gradient accumulation into the product.

    It needs NVIDIA's apex, or torch from 2.8 on, whose half-precision products can return float32.
    """
    has_product = find_spec("fused_weight_gradient_mlp_cuda") is not None or has_torch_product()
    return torch.cuda.is_available() and has_product


def has_torch_product() -> bool:
    """Whether torch has half-precision products with float32 output."""
    return hasattr(torch.ops.aten.addmm, "dtype_out")


def has_cuda_graphs() -> bool:
    """Whether blocks can be recorded: needs a GPU, and the kernel that reads segments from tensors."""
    return torch.cuda.is_available() and has_varlen_attention()
