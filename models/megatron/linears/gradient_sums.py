"""Sums of weight gradients over the micro-batches of a step, accumulated by the matrix products.

The first product of a step overwrites its sum, so that it needs no zeroing.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, layers
from torch import Tensor

from megadit.models.megatron.extensions import has_torch_product


def give_megatron_a_product() -> None:
    """Provides torch's product in place of the one function that Megatron needs of apex, where torch is new enough;
    call it before linears are created."""
    if has_torch_product():
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_weight_gradient)
        layers._grad_accum_fusion_available = True


def add_weight_gradient(x_NI: Tensor, grad_NO: Tensor, sum_OI: Tensor) -> None:
    """sum += grad^T x in float32, rounded once; the first product of a step overwrites the sum."""
    is_first, sum_OI.is_of_before = getattr(sum_OI, "is_of_before", False), False
    multiply_into(sum_OI, grad_NO.t(), x_NI, beta=0 if is_first else 1)


def multiply_into(sum_OI: Tensor, a_ON: Tensor, b_NI: Tensor, *, beta: int) -> None:
    """sum = beta sum + a b: torch's half-precision product with float32 output, on GPUs. With beta 0, sum is not
    read."""
    half = {} if a_ON.dtype == torch.float32 else {"out_dtype": torch.float32}
    torch.addmm(sum_OI, a_ON, b_NI, beta=beta, **half, out=sum_OI)


def leave_unzeroed(part: DistributedDataParallel) -> None:
    """Make `part.zero_grad_buffer` skip gradient sums that our products overwrite.

    Sums that no product wrote in a step are zeroed before they are reduced.
    """
    product = getattr(layers, "fused_weight_gradient_mlp_cuda", None)
    if getattr(product, "wgrad_gemm_accum_fp32", None) is not add_weight_gradient:
        return
    linears = [x for x in part.module.modules() if isinstance(x, ColumnParallelLinear | RowParallelLinear)]
    weights = {linear.weight for linear in linears if linear.gradient_accumulation_fusion}
    for buffer in part.buffers + part.expert_parallel_buffers:
        others = [parameter.main_grad for parameter in buffer.params if parameter not in weights]
        buffer.reset = partial(_begin, [weight.main_grad for weight in weights.intersection(buffer.params)], others)
    part.finish_grad_sync = partial(_reduce, part.finish_grad_sync, [weight.main_grad for weight in weights])


def _begin(overwritten: list[Tensor], others: list[Tensor]) -> None:
    if others:
        torch._foreach_zero_(others)
    for total in overwritten:
        total.is_of_before = True


def _reduce(reduce: Callable[..., None], overwritten: list[Tensor], **options: Any) -> None:
    for total in overwritten:
        if getattr(total, "is_of_before", False):
            total.zero_()
            total.is_of_before = False
    reduce(**options)
