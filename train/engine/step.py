"""One optimizer step: forward and backward over the micro-batches, reduction, update, EMA weights."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megadit.models.flops import training_flops
from megadit.models.host_to_device import sent_together
from megadit.models.megatron.linears.fp8 import weights_unchanged
from megadit.models.shared.errors import UserError
from megadit.train.data.packs.packed_batch import REFUSALS, PackedBatch
from megadit.train.engine.balance import Counts, exchange_counts
from megadit.train.engine.schedule import run_schedule
from megadit.train.engine.setup import Training
from megadit.train.monitoring.anomalies import Anomaly, AnomalyDetector
from megadit.train.objectives.distillation import generated
from megadit.train.objectives.losses import LossSums
from megadit.train.optim.optimizer import loss_scaler

Mark = Callable[[int, str], None]
"""(step, what the rank is about to do): a report to the watchdog."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of one step, summed over all data-parallel ranks."""

    loss: float
    """Mean of lambda(sigma) |D - x0|^2 (classifiers: cross-entropy) over the tokens of the global batch."""
    error: float
    """Mean of |D - x0|^2; for classifiers the error rate."""
    objective: float
    grad_norm: float
    lr: float
    """Learning rate after the step, which is what Megatron's training loop logs, too."""
    tokens: int
    samples: int
    refused: dict[str, int]
    """Samples that the readers rejected since the last step, by reason."""
    unreadable_shards: list[str]
    """Shards with samples that this rank's reader could not read."""
    flops: int
    imbalance: float
    """Floating-point operations of the busiest data-parallel rank over the mean of all."""
    seconds: float
    sample_checksum: int
    """Checksum of the samples and their occurrences, independent of order and layout."""
    expert_counts: Counts
    """Tokens of each expert of each layer (token-choice routing)."""
    reading_seconds: float
    """Part of `seconds` spent waiting for data on this rank."""
    must_stop: bool
    """Whether some rank got a request to stop."""
    must_save: bool
    """Whether a checkpoint is due on some rank."""
    anomaly: Anomaly | None
    """Why the weights were not updated, or should not have been."""
    critic_loss: float | None = None
    """Loss of the fake-score network, if any, in its last update."""


def train_step(
    training: Training,
    batches: Iterator[PackedBatch],
    step: int,
    *,
    must_stop: bool = False,
    must_save: bool = False,
    detector: AnomalyDetector | None = None,
    mark: Mark = lambda step, doing: None,
) -> StepResult:
    """Run optimizer step `step` (1, 2, ...).

    After an anomaly the weights are those before the step, unless a non-finite gradient ends the run: then they must
    not be used.
    """
    detector = detector or AnomalyDetector(training.config.health, [])
    start = time.perf_counter()
    mark(step, "reading data")
    seen = [next(batches) for _ in range(training.num_micro_batches)]
    reading_seconds = time.perf_counter() - start
    mark(step, "computing losses and gradients")
    critic_loss = _update_critic(training, seen, step)
    training.begin_step(step)
    sums = _forward_backward(training, seen)
    expert_counts = exchange_counts(training)
    mark(step, "adding up the losses of all ranks")
    loss, totals = _loss_of(training, sums, seen, (must_stop, must_save))
    mark(step, "updating the weights")
    grad_norm, anomaly = math.nan, detector.loss(step, loss)
    if anomaly is None:
        grad_norm, anomaly = _update(training, step, detector, totals["norm"])
    training.scheduler.step(1)
    if anomaly is not None:
        anomaly = anomaly if anomaly.is_usual else replace(anomaly, samples=_samples(sums, seen))
    else:
        mark(step, "updating the EMA weights")
        training.ema_weights.update(step)
    return StepResult(
        loss=loss,
        error=totals["error"] / totals["tokens"],
        objective=totals["objective"] / totals["tokens"],
        grad_norm=grad_norm,
        lr=training.optimizer.param_groups[0]["lr"],
        tokens=round(totals["tokens"]),
        samples=round(totals["samples"]),
        refused={kind: round(totals[kind]) for kind in REFUSALS if totals[kind]},
        unreadable_shards=[shard for batch in seen for shard in batch.unreadable_shards],
        flops=round(totals["flops"]),
        imbalance=totals["imbalance"],
        seconds=time.perf_counter() - start,
        sample_checksum=round(totals["sample_checksum"]),
        expert_counts=expert_counts,
        reading_seconds=reading_seconds,
        must_stop=totals["must_stop"] > 0,
        must_save=totals["must_save"] > 0,
        anomaly=anomaly,
        critic_loss=critic_loss,
    )


def _loss_of(
    training: Training, sums: Tensor, seen: Sequence[PackedBatch], asked: tuple[bool, bool] = (False, False)
) -> tuple[float, dict[str, float]]:
    """The mean loss over all ranks, and all results of `_reduce`."""
    norm = None if training.device_update is None else training.device_update.prepare()
    totals = _reduce(training, sums, seen, asked, norm)
    return math.nan if totals["bad_ranks"] else totals["weighted"] / totals["tokens"], totals


def _update_critic(training: Training, seen: Sequence[PackedBatch], step: int) -> float | None:
    """Update the critic on the student's current samples for the same conditioning; return its last loss. Raises
    UserError if loss or gradient is not finite."""
    critic, student = training.critic, training.parts[0]
    if critic is None:
        return None
    detector = AnomalyDetector(training.config.health, [])
    for update in range(1, 1 + training.config.train.distill.critic_updates):
        made = [student(batch.arrived(), partial(generated, step=step, update=update)) for batch in seen]
        critic.begin_step(step)
        sums = _forward_backward(critic, made)
        exchange_counts(critic)
        loss, totals = _loss_of(critic, sums, made)
        anomaly = detector.loss(step, loss) or _update(critic, step, detector, totals["norm"])[1]
        if anomaly is not None:
            raise UserError(f"the critic: {anomaly.what}; try a lower train.distill.critic_lr")
    critic.scheduler.step(1)
    return loss


def _update(training: Training, step: int, detector: AnomalyDetector, norm: float) -> tuple[float, Anomaly | None]:
    """Update the weights; return the gradient norm (`norm`, if that is known), and its anomaly."""
    optimizer = training.optimizer
    if training.device_update is not None:
        anomaly = detector.gradient(step, norm)
        if anomaly is None:
            training.device_update.step(norm)
        return norm, anomaly
    if (scaler := loss_scaler(optimizer)) is not None:
        scale = scaler.scale.item()
        is_updated, norm, _ = optimizer.step()
        return (norm, detector.gradient(step, norm)) if is_updated else (math.inf, detector.overflow(step, scale))
    if detector.checks_before_update:
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if (anomaly := detector.gradient(step, norm)) is not None:
            return norm, anomaly
    _, norm, _ = optimizer.step()
    return norm, detector.gradient(step, norm)


def _forward_backward(training: Training, batches: Sequence[PackedBatch]) -> Tensor:
    """Gradients of the mean objective over the global batch, and the losses of each micro-batch, [micro-batches, 3].

    There are no losses, [0, 3], on a stage that is not the last.
    """

    def forward_step(iterator, part):
        batch = next(iterator).arrived()
        return part(batch), partial(_loss, batch)

    for part in training.parts:
        part.zero_grad_buffer()
    training.optimizer.zero_grad()
    distill = training.config.train.distill
    num_networks = 1 if distill is None else distill.num_networks_sent
    train = training.config.train
    with weights_unchanged(training.parts if train.fp8 != "none" else (), caches=train.fp8_weight_cache):
        losses = run_schedule(training, forward_step, batches, num_networks=num_networks)
    return torch.stack(losses) if losses else torch.zeros(0, 3, device=training.groups.device)


def _loss(batch: PackedBatch, sums: LossSums) -> tuple[Tensor, Tensor, Tensor]:
    """(objective, number of tokens, report): Megatron divides the sum of the first by the sum of the second."""
    num_tokens = torch.full((), batch.num_tokens, dtype=torch.int, device=sums.objective.device)  # nothing is sent
    return sums.objective, num_tokens, torch.stack([value.detach() for value in sums])


def _reduce(
    training: Training, sums: Tensor, seen: Sequence[PackedBatch], asked: tuple[bool, bool], norm: Tensor | None
) -> dict[str, float]:
    """Sums over all ranks, in one collective; ranks that computed the same values count once.

    `asked`: whether this rank must stop, and save. `norm`: the gradient norm, read here too, because this is the only
    host synchronization of a step.
    """
    groups, config = training.groups, training.config
    forwards = 0 if training.teacher is None else config.train.distill.forwards(training.teacher.is_guided)
    objective, weighted, error = sums.double().sum(0)
    bad_rank = (~sums.isfinite()).any().double()
    share = groups.is_last_stage / groups.context.size  # all ranks of a replica know all samples
    checksum = share * torch.stack([_checksum(batch) for batch in seen]).sum().double()  # float32 would round it
    losses = torch.stack([objective, weighted, error, bad_rank, checksum]).nan_to_num(0.0)
    flops_of_ranks = [0.0] * groups.readers.size()
    flops_of_ranks[groups.readers.rank()] = share * sum(
        training_flops(batch.layout, config.model, config.train.adapter, forwards) for batch in seen
    )
    counts = [
        groups.is_last_stage * sum(batch.num_tokens for batch in seen),
        share * sum(not segment.is_padding for batch in seen for segment in batch.layout.segments),
        *map(float, asked),
        *(share * sum(counts) for counts in zip(*(batch.refused for batch in seen), strict=True)),
        *flops_of_ranks,
    ]
    values = torch.cat([losses, *sent_together([torch.tensor(counts, dtype=torch.float64)], losses.device)])
    dist.all_reduce(values)
    names = ("objective", "weighted", "error", "bad_ranks", "sample_checksum")
    names = (*names, "tokens", "samples", "must_stop", "must_save", *REFUSALS)
    last = torch.full((1,), math.nan, device=losses.device) if norm is None else norm.view(1)
    *found, norm = torch.cat([values / groups.tensor.size(), last.double()]).tolist()
    of_ranks = found[len(names) :]
    flops = sum(of_ranks)
    imbalance = max(of_ranks) * len(of_ranks) / flops if flops else 1.0
    return dict(zip(names, found, strict=False)) | {"norm": norm, "flops": flops, "imbalance": imbalance}


def _checksum(batch: PackedBatch) -> Tensor:
    """Sum over the keys of samples, which depend on seed, id and occurrence; exact in float64."""
    return (batch.noise_key_G & 0xFFFFFFFF).sum()  # padding has key 0


def _samples(sums: Tensor, seen: Sequence[PackedBatch]) -> tuple[str, ...]:
    """Samples of the step with non-finite losses, or else all, from all ranks."""
    is_bad = (~sums.isfinite()).any(dim=1).tolist()
    bad = [name for batch, bad in zip(seen, is_bad, strict=False) if bad for name in batch.sample_ids if name]
    every = [name for batch in seen for name in batch.sample_ids if name]
    everyones: list[tuple[list[str], list[str]]] = [([], [])] * dist.get_world_size()
    dist.all_gather_object(everyones, (bad, every))
    names = {name for part, _ in everyones for name in part} or {name for _, part in everyones for name in part}
    return tuple(sorted(names))
