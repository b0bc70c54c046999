"""Optimizer step without host synchronization: its scalars are read from the GPU once, together with the losses.

Megatron synchronizes for the number of tokens, by which it divides all gradients, for the norm of each gradient, and
for the total norm, by which it clips. Here the norm is read together with the losses of the step.

Gradients are scaled differently for different optimizers:

    HalfMomentAdamW     reads each gradient once, times both factors, and writes the weight too; Megatron's division,
                        clipping, update and copies pass over memory seven times more. The equations are the same, but
                        rounded in another order. CPU runs, which would gain nothing, use Megatron's functions.
    others              use Megatron's functions with the norm passed in: bit-identical results for AdamW with float32
                        moments and Muon.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.utils import get_data_parallel_group_if_dtensor, to_local_if_dtensor
from torch import Tensor
from torch.distributed import ProcessGroup

from megadit.train.engine.fully_sharded import FullySharded
from megadit.train.optim.adamw import HalfMomentAdamW
from megadit.train.optim.state import DataParallel

CLIP_EPS = 1e-6
"""Megatron's constant that keeps the clipping factor finite."""


class DeviceUpdate:
    """Reduces gradients and updates the weights in place of Megatron's `finalize_model_grads` and `optimizer.step`."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._optimizer = optimizer
        self._per_token: Tensor | None = None
        parts = optimizer.chained_optimizers
        self._folds = all(isinstance(part.optimizer, HalfMomentAdamW) for part in parts)
        for part in parts if self._folds else ():
            if isinstance(part, Float16OptimizerWithFloat16Params):
                pairs = zip(part.fp32_from_float16_groups, part.float16_groups, strict=True)
                part.optimizer.rounded = {
                    master: weight.detach()
                    for masters, weights in pairs
                    for master, weight in zip(masters, weights, strict=True)
                }
                part._copy_main_params_to_model_params = lambda: None  # AdamW has written them

    def finalize(self, parts: list[DataParallel], num_tokens: Tensor | None = None, **options: Any) -> None:
        """Call Megatron's `finalize_model_grads` without `num_tokens` (a scalar), for which it would synchronize.

        Divides by it here, or in AdamW if that scales the gradients.
        """
        finalize_model_grads(parts, None, **options)
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(num_tokens, parallel_state.get_pipeline_model_parallel_last_rank(), group=pipeline)
        dist.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        self._per_token = 1 / num_tokens.clamp(min=1).float()
        for part in parts if not self._folds else ():
            part.scale_gradients(self._per_token)

    @torch.no_grad()
    def prepare(self) -> Tensor:
        """The gradient norm, a float64 scalar on the device."""
        self._optimizer.prepare_grads()
        norm = self._norm()
        if not self._folds:
            return norm
        norm = norm * self._per_token
        parts = self._optimizer.chained_optimizers
        limit = parts[0].config.clip_grad
        clip = (limit / (norm + CLIP_EPS)).clamp(max=1) if limit > 0 else torch.ones_like(norm)
        for part in parts:
            part.optimizer.gradient_factor = self._per_token * clip
        return norm

    def step(self, norm: float) -> None:
        """Update the weights; `norm` is the value that `prepare` returned."""
        if self._folds:
            self._optimizer.step_with_ready_grads()
            return
        self._optimizer.get_grad_norm = lambda: norm  # otherwise its step computes it, and synchronizes
        self._optimizer.step()

    def _norm(self) -> Tensor:
        """Gradient norm, summed as in Megatron: over all optimizers if they share their ranks, else one by one."""
        parts, device = self._optimizer.chained_optimizers, self._per_token.device
        gradients = [part.get_main_grads_for_grad_norm() for part in parts]
        groups = [part.get_grad_stats_parallel_group() for part in parts]
        if isinstance(self._optimizer, LayerWiseDistributedOptimizer):
            groups = [None] * len(parts)
        if all(group == groups[0] for group in groups):
            return _norm([x for of_chunk in gradients for x in of_chunk], groups[0], device)
        norms = [_norm(of_chunk, group, device) for of_chunk, group in zip(gradients, groups, strict=True)]
        return sum(norm.square() for norm in norms).sqrt()


def _norm(gradients: Sequence[Tensor], group: ProcessGroup | None, device: torch.device) -> Tensor:
    """Norm of gradients over all ranks of a group (None: all ranks), float64 [1]."""
    sharded = None
    for gradient in gradients:
        sharded = get_data_parallel_group_if_dtensor(gradient, sharded)
    norms = torch._foreach_norm([to_local_if_dtensor(gradient) for gradient in gradients]) if gradients else ()
    square = torch.linalg.vector_norm(torch.stack(norms)).square() if norms else torch.zeros((), device=device)
    for ranks in ([sharded] if sharded is not None else []) + [group]:
        dist.all_reduce(square, group=ranks)
    return square.double().sqrt()


def device_update(optimizer: MegatronOptimizer, parts: Sequence[DataParallel]) -> DeviceUpdate | None:
    """The update on the device for a run that supports and gains by it, else None."""
    # fp16 uses Megatron's loss scaling and overflow check
    if any(getattr(part, "grad_scaler", None) is not None for part in optimizer.chained_optimizers):
        return None
    wrapped = all(isinstance(part, (DistributedDataParallel, FullySharded)) for part in parts)
    on_gpu = all(parameter.is_cuda for part in parts for parameter in part.module.parameters())
    return DeviceUpdate(optimizer) if wrapped and on_gpu else None
