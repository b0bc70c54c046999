"""Results of a benchmark of optimizer steps."""

from dataclasses import dataclass

from rich.table import Table

from megadit.train.config.schema import RunConfig


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
    for shares in (measurements.parts, measurements.operations):
        for name, share in shares.items():
            table.add_row(name, f"{share:.1%}")
        table.add_section()
    return table
