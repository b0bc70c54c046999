"""Measurement of optimizer steps: time, throughput, memory, padding, and a breakdown of the time; tables of them."""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table

from megadit.infer.benchmarks.profile import shares, watch
from megadit.models.machine import datasheet_flops, matmul_flops, peak_memory, reset_peak_memory, synchronize
from megadit.models.megatron.groups import Groups
from megadit.train.config.schema import RunConfig
from megadit.train.data.distribute import TrainBatches
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.engine.setup import Training, build_training
from megadit.train.engine.step import StepResult, train_step
from megadit.train.optim.optimizer import precision
from megadit.train.plan.work import count_parameters, upstream_pack_flops


class Timing(NamedTuple):
    """One step, in seconds of the clock and of this process's processors."""

    seconds: float
    processor_seconds: float
    result: StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """Cost of an optimizer step; rates are per device."""

    parameters: int
    tokens_per_step: float
    """Video tokens of samples, a mean."""
    samples_per_step: float
    fill: float
    """Share of the packs' places that samples take."""
    seconds: float
    """Median."""
    seconds_lowest: float
    seconds_highest: float
    processor_seconds: float
    """Median processor time of the first rank with all its threads, which other work on the machine disturbs least."""
    reading_share: float
    """Share of the time spent waiting for data."""
    tokens_per_second: float
    tflops: float
    """Operations counted as `models/flops.py` does."""
    upstream_tflops: float
    """Counted by the formula of published throughputs: 6 x all parameters x tokens + self-attention."""
    matmul_tflops: float
    """Rate of a large matrix product, measured on this device in this precision."""
    datasheet_tflops: float | None
    peak_memory_gb: float
    """Memory of the rank with the most: allocated by torch on a GPU, used by the process on a CPU."""
    empty_memory_gb: float
    """Part of `peak_memory_gb` used before the network was built; 0 on a GPU."""
    parts: dict[str, float]
    """Share of the time of one step by what the loop was doing."""
    operations: dict[str, float]
    """Share of its computing time by kind of operation."""

    @property
    def matmul_utilization(self) -> float:
        return self.tflops / self.matmul_tflops

    @property
    def utilization(self) -> float | None:
        return None if self.datasheet_tflops is None else self.tflops / self.datasheet_tflops


@dataclass
class _Watched:
    """Iterator of batches that counts their operations by the published formula."""

    batches: Iterator[PackedBatch]
    config: RunConfig
    upstream_flops: float = 0.0

    def __next__(self) -> PackedBatch:
        batch = next(self.batches)
        self.upstream_flops += upstream_pack_flops(batch.layout, self.config.model)
        return batch


def measure_steps(
    config: RunConfig,
    groups: Groups,
    *,
    warmup: int,
    steps: int,
    trace: str | None = None,
    advance: Callable[[], None] = lambda: None,
) -> StepCosts:
    """Times `steps` optimizer steps after `warmup` others, and watches one more closely. Every rank calls this.

    Args:
        config: the run; its weights and data are made and thrown away.
        groups: see `start_processes`.
        trace: a file for a Chrome trace of the watched step, written by the first rank.
        advance: called after each step.
    """
    device = groups.device
    reset_peak_memory(device)
    empty = peak_memory(device)
    training = build_training(config, groups)
    watched = _Watched(TrainBatches(config, groups), config)
    timings = []
    for step in range(1, warmup + steps + 1):
        if step == warmup + 1:
            reset_peak_memory(device)
            watched.upstream_flops = 0.0
        timings.append(_timed_step(training, watched, step))
        advance()
    timings = timings[warmup:]
    memory = _reduce(peak_memory(device), device, dist.ReduceOp.MAX)
    upstream = _sum_over_copies(watched.upstream_flops, groups) / steps
    parts, operations = _watch_step(training, watched, warmup + steps + 1, trace if groups.is_first else None)
    advance()
    return _measurements(config, groups, timings, upstream, (memory, empty), parts, operations)


def _timed_step(training: Training, batches: _Watched, step: int) -> Timing:
    device = training.groups.device
    synchronize(device)
    start, processor = time.perf_counter(), time.process_time()
    result = train_step(training, batches, step)
    synchronize(device)
    return Timing(time.perf_counter() - start, time.process_time() - processor, result)


def _watch_step(
    training: Training, batches: _Watched, step: int, trace: str | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of a step's time by what the loop says that it is doing, and of its computing by kind of operation."""
    device, marks = training.groups.device, []

    def mark(_: int, doing: str) -> None:
        synchronize(device)
        marks.append((doing, time.perf_counter()))

    def step_with_marks() -> None:
        train_step(training, batches, step, mark=mark)
        mark(step, "")

    operations = watch(step_with_marks, device, trace)
    parts: defaultdict[str, float] = defaultdict(float)
    for (doing, now), (_, then) in itertools.pairwise(marks):
        parts[doing] += then - now
    return shares(parts), operations


def _measurements(
    config: RunConfig,
    groups: Groups,
    timings: list[Timing],
    upstream: float,
    memory: tuple[int, int],
    parts: dict[str, float],
    operations: dict[str, float],
) -> StepCosts:
    seconds = [timing.seconds for timing in timings]
    median = statistics.median(seconds)
    results = [timing.result for timing in timings]
    tokens = statistics.mean(result.tokens for result in results)
    device, dtype = groups.device, precision(config)
    datasheet = datasheet_flops(device, dtype)
    return StepCosts(
        parameters=count_parameters(config.model).total,
        tokens_per_step=tokens,
        samples_per_step=statistics.mean(result.samples for result in results),
        fill=tokens / (config.data.global_batch_size * config.data.seq_length),
        seconds=median,
        seconds_lowest=min(seconds),
        seconds_highest=max(seconds),
        processor_seconds=statistics.median(timing.processor_seconds for timing in timings),
        reading_share=sum(result.reading_seconds for result in results) / sum(seconds),
        tokens_per_second=tokens / median / groups.world_size,
        tflops=statistics.mean(result.flops for result in results) / median / groups.world_size / 1e12,
        upstream_tflops=upstream / median / groups.world_size / 1e12,
        matmul_tflops=_reduce(matmul_flops(device, dtype, seconds=1.0), device, dist.ReduceOp.MIN) / 1e12,
        datasheet_tflops=None if datasheet is None else datasheet / 1e12,
        peak_memory_gb=memory[0] / 1e9,
        empty_memory_gb=memory[1] / 1e9 if device.type == "cpu" else 0.0,
        parts=parts,
        operations=operations,
    )


def _sum_over_copies(value: float, groups: Groups) -> float:
    """Over the ranks that read, each of which counts for all ranks of its copy of the model."""
    return _reduce(value if groups.copy.rank() == 0 else 0.0, groups.device, dist.ReduceOp.SUM)


def _reduce(value: float, device: torch.device, operation: dist.ReduceOp) -> float:
    """Over all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, operation)
    return tensor.item()


def table_of(config: RunConfig, measurements: StepCosts) -> Table:
    one, data = measurements, config.data
    samples = "mock samples" if data.mock else data.path
    packs = f"{data.global_batch_size} packs of {data.seq_length:,} tokens"
    table = Table("figure", "value", title=f"{config.recipe}: {packs}, {config.train.precision}, {samples}")
    utilization = "not in the table of data sheets" if one.utilization is None else f"{one.utilization:.1%}"
    network = f"({one.empty_memory_gb:.3g} before there was a network)"
    content = f"({one.tokens_per_step:,.0f} tokens, {one.samples_per_step:.1f} samples a step)"
    for name, value in {
        "parameters": f"{one.parameters:,}",
        "step": f"{one.seconds:.4g} s (from {one.seconds_lowest:.4g} to {one.seconds_highest:.4g})",
        "processor time of a step, first rank": f"{one.processor_seconds:.4g} s",
        "tokens/s/device": f"{one.tokens_per_second:,.1f}",
        "computed TFLOP/s/device": f"{one.tflops:.4g}",
        "upstream formula, TFLOP/s/device": f"{one.upstream_tflops:.4g}",
        "MFU of the data sheet": utilization,
        "MFU of the measured matmul rate": f"{one.matmul_utilization:.1%} of {one.matmul_tflops:.4g} TFLOP/s",
        "peak memory of a rank": f"{one.peak_memory_gb:.3g} GB {network}",
        "fill of packs": f"{one.fill:.1%} {content}",
        "waiting for data": f"{one.reading_share:.1%}",
    }.items():
        table.add_row(name, value)
    return table


def shares_of(measurements: StepCosts) -> Table:
    table = Table("part of a step", "share", title="one step more, watched")
    for kind in (measurements.parts, measurements.operations):
        for name, share in kind.items():
            table.add_row(name, f"{share:.1%}")
        table.add_section()
    return table
