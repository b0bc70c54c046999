"""An optimizer step whose numbers stay on the GPU: read there, scaled there, asked for once.

Megatron divides all gradients by the number of tokens, reads their norm, waits for it, multiplies them by the factor of
clipping, updates the master copies and copies these to the weights: seven passes over memory beside AdamW's own, and
two waits. Here AdamW reads each gradient once, times both factors, and writes the weight too. The norm is asked for
together with the losses.

For `HalfMomentAdamW` in Megatron's data-parallel wrapper. The same equations, whose products are rounded in another
order: runs on CPUs, which gain nothing, keep the old one to the bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from megadit.train.adamw import HalfMomentAdamW
from megadit.train.optimizer_state import DataParallel

CLIP_EPS = 1e-6
"""Megatron's: keeps the factor of clipping finite."""


class DeviceUpdate:
    """Reduces gradients and updates the weights in place of Megatron's `finalize_model_grads` and `optimizer.step`."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._optimizer = optimizer
        self._per_token: Tensor | None = None
        for part in optimizer.chained_optimizers:
            if isinstance(part, Float16OptimizerWithFloat16Params):
                pairs = zip(part.fp32_from_float16_groups, part.float16_groups, strict=True)
                part.optimizer.rounded = {
                    master: weight.detach()
                    for masters, weights in pairs
                    for master, weight in zip(masters, weights, strict=True)
                }
                part._copy_main_params_to_model_params = lambda: None  # AdamW has written them

    def finalize(self, parts: list[DataParallel], num_tokens: Tensor | None = None, **options: Any) -> None:
        """What Megatron's function of this name does, but for the division by `num_tokens`, a scalar."""
        finalize_model_grads(parts, None, **options)
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(num_tokens, parallel_state.get_pipeline_model_parallel_last_rank(), group=pipeline)
        dist.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        self._per_token = 1 / num_tokens.clamp(min=1).float()

    @torch.no_grad()
    def prepare(self) -> Tensor:
        """The norm of the gradient, one number on the device; tells AdamW what to multiply gradients by."""
        self._optimizer.prepare_grads()
        parts = self._optimizer.chained_optimizers
        squares = [_square(part.get_main_grads_for_grad_norm(), self._per_token.device) for part in parts]
        if self._optimizer.grads_states_parallel_group_is_shared():
            squares = [torch.stack(squares).sum()]
        for square, part in zip(squares, parts, strict=False):
            dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
        norm = torch.stack(squares).sum().sqrt() * self._per_token
        limit = parts[0].config.clip_grad
        clip = (limit / (norm + CLIP_EPS)).clamp(max=1) if limit > 0 else torch.ones_like(norm)
        for part in parts:
            part.optimizer.gradient_factor = self._per_token * clip
        return norm

    def step(self) -> None:
        """Updates the weights; call `prepare` before."""
        self._optimizer.step_with_ready_grads()


def _square(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all numbers."""
    if not gradients:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(list(gradients))).square().sum()


def device_update(optimizer: MegatronOptimizer, parts: Sequence[DataParallel]) -> DeviceUpdate | None:
    """The update on the device, for a run that can have it and gains by it."""
    # a loss scale is read, and its gradients looked through, in Megatron's way
    if any(getattr(part, "grad_scaler", None) is not None for part in optimizer.chained_optimizers):
        return None
    halves = all(isinstance(part.optimizer, HalfMomentAdamW) for part in optimizer.chained_optimizers)
    wrapped = all(isinstance(part, DistributedDataParallel) for part in parts)
    on_gpu = all(parameter.is_cuda for part in parts for parameter in part.module.parameters())
    return DeviceUpdate(optimizer) if halves and wrapped and on_gpu else None
