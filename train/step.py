"""One optimizer step: forward and backward over the micro-batches, reduction, update, averages."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megadit.models.support import UserError
from megadit.train.data.batch import PackedBatch
from megadit.train.flops import training_flops
from megadit.train.loss import LossSums
from megadit.train.setup import Training


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step, summed over all data-parallel ranks."""

    loss: float
    """lambda(sigma) |D - x0|^2, a mean over the tokens of the global batch."""
    squared_error: float
    objective: float
    grad_norm: float
    lr: float
    tokens: int
    samples: int
    flops: int
    seconds: float
    must_stop: bool
    """Some rank was told to stop."""


def train_step(training: Training, batches: Iterator[PackedBatch], step: int, *, must_stop: bool) -> StepResult:
    """Does optimizer step `step` (1, 2, ...).

    Raises:
        UserError: if the loss or the gradient is not a number; the weights are those before the step, or no longer to
            be used. Ranks other than the first exit with the same code and say nothing.
    """
    start = time.perf_counter()
    seen: list[PackedBatch] = []
    sums = _forward_backward(training, batches, seen)
    totals = _reduce(training, sums, seen, must_stop)
    if totals["bad_ranks"]:
        _stop_with_bad_loss(training, sums, seen, step)
    training.scheduler.step(1)
    _, grad_norm, _ = training.optimizer.step()
    if not math.isfinite(grad_norm):
        _fail(training, f"the gradient of step {step} has norm {grad_norm}; {_remedy(training)}")
    training.averages.update(step)
    return StepResult(
        loss=totals["weighted"] / totals["tokens"],
        squared_error=totals["squared_error"] / totals["tokens"],
        objective=totals["objective"] / totals["tokens"],
        grad_norm=grad_norm,
        lr=training.optimizer.param_groups[0]["lr"],
        tokens=round(totals["tokens"]),
        samples=round(totals["samples"]),
        flops=round(totals["flops"]),
        seconds=time.perf_counter() - start,
        must_stop=totals["must_stop"] > 0,
    )


def _forward_backward(training: Training, batches: Iterator[PackedBatch], seen: list[PackedBatch]) -> Tensor:
    """Gradients of the mean objective over the global batch, and the losses of each micro-batch, [micro-batches, 3]."""

    def forward_step(iterator, model):
        batch = next(iterator)
        seen.append(batch)
        return model(batch), partial(_loss, batch)

    training.model.zero_grad_buffer()
    training.optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=training.model,
        num_microbatches=training.num_micro_batches,
        seq_length=training.config.data.seq_length,
        micro_batch_size=training.config.data.micro_batch_size,
        forward_only=False,
    )
    return torch.stack(losses)


def _loss(batch: PackedBatch, sums: LossSums) -> tuple[Tensor, Tensor, Tensor]:
    """Megatron sums the first over ranks and micro-batches and divides it by the sum of the second."""
    num_tokens = torch.tensor(batch.num_tokens, dtype=torch.int, device=sums.objective.device)
    return sums.objective, num_tokens, torch.stack([value.detach() for value in sums])


def _reduce(training: Training, sums: Tensor, seen: list[PackedBatch], must_stop: bool) -> dict[str, float]:
    """Sums over all ranks, in one collective; tensor-parallel peers, who computed the same, count once."""
    objective, weighted, squared_error = sums.double().sum(0)
    counts = [
        sum(batch.num_tokens for batch in seen),
        sum(not segment.is_padding for batch in seen for segment in batch.layout.segments),
        sum(training_flops(batch.layout, training.config.model) for batch in seen),
        float(must_stop),
    ]
    bad_rank = (~sums.isfinite()).any().double()
    values = torch.stack([objective, weighted, squared_error, bad_rank]).nan_to_num(0.0)
    values = torch.cat([values, torch.tensor(counts, dtype=torch.float64, device=values.device)])
    dist.all_reduce(values)
    names = ("objective", "weighted", "squared_error", "bad_ranks", "tokens", "samples", "flops", "must_stop")
    peers = training.groups.tensor.size()
    return dict(zip(names, (values / peers).tolist(), strict=True))


def _stop_with_bad_loss(training: Training, sums: Tensor, seen: list[PackedBatch], step: int) -> NoReturn:
    is_bad = (~sums.isfinite()).any(dim=1).tolist()
    mine = [name for batch, bad in zip(seen, is_bad, strict=True) if bad for name in batch.sample_ids if name]
    everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, mine)
    names = sorted({name for part in everyones for name in part})
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    _fail(training, f"the loss of step {step} is not a finite number; samples: {shown}; {_remedy(training)}")


def _remedy(training: Training) -> str:
    return (
        f"the last good checkpoint in {training.config.train.output_dir} is kept: "
        "try a lower optimizer.lr, or look at these samples"
    )


def _fail(training: Training, message: str) -> NoReturn:
    if training.groups.is_first:
        raise UserError(message)
    raise SystemExit(2)
