"""Runs micro-batches through the model chunks of all ranks by Megatron's pipeline schedules."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megadit.models.configs.config import DiTConfig
from megadit.models.packing.pack_layout import PackLayout
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.engine.setup import Training
from megadit.train.optim.state import DataParallel


def run_schedule(
    training: Training,
    forward_step: Callable[..., Any],
    batches: Sequence[PackedBatch],
    *,
    forward_only: bool = False,
    num_networks: int = 1,
) -> list[Any]:
    """Return the results of `forward_step` for each micro-batch on the last stage; [] on others.

    `num_networks`: networks whose activations stages exchange, one after the other.

    All ranks of a model replica call this with the same samples. They are read beforehand, because a stage may be
    several micro-batches ahead of the next.
    """
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in training.parts],
        model=list(training.parts),
        num_microbatches=len(batches),
        seq_length=num_networks * _tokens_sent(training.config.model, batches[0].layout.whole),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _tokens_sent(model: DiTConfig, layout: PackLayout) -> int:
    """Tokens that stages exchange per micro-batch: its packs are concatenated; two towers send both sequences."""
    return layout.capacity + (layout.text_capacity if model.task == "match" else 0)


@torch.no_grad()
def evaluate(
    training: Training, compute: Callable[[DataParallel, PackedBatch], Any], batches: Sequence[PackedBatch]
) -> list[Any]:
    """Return compute(chunk, batch) of the last model chunk for each micro-batch on the last stage; [] on others.

    For earlier chunks `compute` must return the activations. Call it within `evaluation`.
    """
    pipeline = training.groups.pipeline.size()

    def forward_step(iterator, part):
        return compute(part, next(iterator).arrived()), lambda output, non_loss_data: output

    # interleaved stages process micro-batches in rounds of as many as there are stages
    missing = -len(batches) % pipeline if len(training.parts) > 1 else 0
    found = run_schedule(training, forward_step, [*batches, *batches[-1:] * missing], forward_only=True)
    return found[: len(batches)]


@contextmanager
def evaluation(training: Training) -> Iterator[None]:
    """Within the block parameters may be read and replaced: no gather of updated ones is in progress or begins."""
    waiting = [
        part
        for part in training.parts
        if isinstance(part, DistributedDataParallel) and part.ddp_config.overlap_param_gather
    ]
    for part in waiting:
        part.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for part in waiting:
            part.enable_forward_pre_hook()


def from_last_stage(training: Training, tensor: Tensor | None, like: Tensor) -> Tensor:
    """Broadcast a tensor (of `like`'s shape and type) from the last stage to all stages."""
    pipeline = training.groups.pipeline
    if pipeline.size() == 1:
        return tensor
    tensor = torch.empty_like(like) if tensor is None else tensor.contiguous()
    dist.broadcast(tensor, dist.get_global_rank(pipeline, pipeline.size() - 1), group=pipeline)
    return tensor
