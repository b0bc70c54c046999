"""One optimizer step: forward and backward over the micro-batches, reduction, update, averages."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from megadit.models.support import UserError
from megadit.train.data.batch import PackedBatch
from megadit.train.flops import training_flops
from megadit.train.loss import LossSums
from megadit.train.schedule import run_schedule
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
    seen = [next(batches) for _ in range(training.num_micro_batches)]
    sums = _forward_backward(training, seen)
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


def _forward_backward(training: Training, batches: Sequence[PackedBatch]) -> Tensor:
    """Gradients of the mean objective over the global batch, and the losses of each micro-batch, [micro-batches, 3].

    There are no losses, [0, 3], on a stage that is not the last.
    """

    def forward_step(iterator, part):
        batch = next(iterator)
        return part(batch), partial(_loss, batch)

    for part in training.parts:
        part.zero_grad_buffer()
    training.optimizer.zero_grad()
    losses = run_schedule(training, forward_step, batches)
    return torch.stack(losses) if losses else torch.zeros(0, 3, device=training.groups.device)


def _loss(batch: PackedBatch, sums: LossSums) -> tuple[Tensor, Tensor, Tensor]:
    """Megatron sums the first over ranks and micro-batches and divides it by the sum of the second."""
    num_tokens = torch.tensor(batch.num_tokens, dtype=torch.int, device=sums.objective.device)
    return sums.objective, num_tokens, torch.stack([value.detach() for value in sums])


def _reduce(training: Training, sums: Tensor, seen: Sequence[PackedBatch], must_stop: bool) -> dict[str, float]:
    """Sums over all ranks, in one collective; ranks that computed the same count once."""
    groups = training.groups
    objective, weighted, squared_error = sums.double().sum(0)
    bad_rank = (~sums.isfinite()).any().double()
    losses = torch.stack([objective, weighted, squared_error, bad_rank]).nan_to_num(0.0)
    share = groups.is_last_stage / groups.context.size  # of samples that all ranks of a copy know whole
    counts = [
        groups.is_last_stage * sum(batch.num_tokens for batch in seen),
        share * sum(not segment.is_padding for batch in seen for segment in batch.layout.segments),
        share * sum(training_flops(batch.layout, training.config.model) for batch in seen),
        float(must_stop),
    ]
    values = torch.cat([losses, torch.tensor(counts, dtype=torch.float64, device=losses.device)])
    dist.all_reduce(values)
    names = ("objective", "weighted", "squared_error", "bad_ranks", "tokens", "samples", "flops", "must_stop")
    return dict(zip(names, (values / groups.tensor.size()).tolist(), strict=True))


def _stop_with_bad_loss(training: Training, sums: Tensor, seen: Sequence[PackedBatch], step: int) -> NoReturn:
    is_bad = (~sums.isfinite()).any(dim=1).tolist()
    pairs = zip(seen, is_bad, strict=False)  # an earlier stage has no losses
    mine = [name for batch, bad in pairs if bad for name in batch.sample_ids if name]
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
