"""`megadit benchmark growth`: growth of a training step's time and memory, with exponents.

    megadit benchmark growth FOLDER [--along tokens segments parameters ranks] [--steps 3]

Every point is a run of `megadit benchmark train` in separate processes, whose results are saved in FOLDER, with a table
and a plot. An exponent is the slope of a line through the points in a log-log plot. Time is compared with counted
operations, and memory with the planner's estimate.
"""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from statistics import linear_regression
from typing import Any

from rich.console import Console
from rich.table import Table

from megadit.models.shared.cli.command import python_module
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.files import atomic_path, read_json, write_json
from megadit.models.shared.progress import Progress

RECIPE = "digits_tiny"
BASE = (
    *("model.num_layers=1", "model.hidden_size=64", "model.num_attention_heads=2", "model.in_channels=16"),
    *("data.global_batch_size=1", "data.text_dropout=0", "optimizer.optimizer=adamw", "ema.sigma_rels=[]"),
    "train.num_threads=1",
)
"""Network so small that 65,536 tokens take minutes on a CPU. One thread: several that wait for each other on a busy
machine use processor time, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One thing that grows, all else as in `BASE`."""

    values: tuple[int, ...]
    overrides: Callable[[int], list[str]]
    unit: str
    reading: Callable[[int, dict[str, Any]], float] = lambda value, measurements: value
    """The place on the axis, from the value and what was measured."""
    num_ranks: Callable[[int], int] = lambda value: 1


def _tokens(value: int) -> list[str]:
    """One sample of `value` tokens."""
    shape = f"[[{value // 1024},32,32]]"
    return [f"data.seq_length={value}", f"data.mock_latent_shapes={shape}"]


def _segments(value: int) -> list[str]:
    """8,192 tokens in samples that all differ in length, so that no two can be computed together."""
    length = 8192 // value
    shapes = [[1, 1, length - value // 2 + index] for index in range(value)]
    return ["data.seq_length=8192", "data.text_seq_length=1024", f"data.mock_latent_shapes={shapes}"]


def _parameters(value: int) -> list[str]:
    """A network of width `value`, on 1,024 tokens."""
    return [*_tokens(1024), f"model.hidden_size={value}", f"model.num_attention_heads={value // 32}"]


def _ranks(value: int) -> list[str]:
    """Overrides for one pack per data-parallel rank."""
    return [*_tokens(2048), "model.hidden_size=256", f"data.global_batch_size={value}"]


AXES = {
    "tokens": Axis(values=tuple(1024 * 2**i for i in range(7)), overrides=_tokens, unit="tokens of one sample"),
    "segments": Axis(values=(1, 2, 4, 8, 16, 32, 64), overrides=_segments, unit="samples in a pack of 8,192 tokens"),
    "parameters": Axis(
        values=(64, 128, 256, 512, 1024),
        overrides=_parameters,
        unit="parameters",
        reading=lambda value, measurements: measurements["parameters"],
    ),
    "ranks": Axis(values=(1, 2, 4), overrides=_ranks, unit="data-parallel ranks, a pack each", num_ranks=lambda n: n),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run; all but `place` of one rank."""

    place: float
    seconds: float
    """Processor seconds of a step, which other work on the machine disturbs least."""
    operations: float
    memory: float
    """Memory in bytes, less that of the process without a network."""
    planned_memory: float


@dataclass(frozen=True, slots=True)
class Exponents:
    """Slopes through all points, and through the last two."""

    overall: float
    last: float

    @classmethod
    def of(cls, places: Sequence[float], values: Sequence[float]) -> "Exponents":
        """Fit slopes by least squares in log-log space."""
        return cls(_slope(places, values), _slope(places[-2:], values[-2:]))

    def __str__(self) -> str:
        return f"{self.overall:+.2f} ({self.last:+.2f})"


def _slope(places: Sequence[float], values: Sequence[float]) -> float:
    return linear_regression(list(map(log, places)), list(map(log, values))).slope


def measure_point(axis: Axis, value: int, file: Path, steps: int) -> Point:
    """Run the benchmark of this value; `file` stores its results. Raises UserError if the run failed, with its last
    words."""
    ranks, overrides = axis.num_ranks(value), [*BASE, *axis.overrides(value)]
    command = python_module("megadit.train.benchmarks.train", "--recipe", RECIPE, "--warmup", "1")
    command += ["--steps", str(steps), "--json", str(file), *overrides] + (["--nproc", str(ranks)] if ranks > 1 else [])
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(command)}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    measurements = read_json(file)["measurements"]
    return Point(
        place=axis.reading(value, measurements),
        seconds=measurements["processor_seconds"],
        operations=measurements["tflops"] * 1e12 * measurements["seconds"],
        memory=(measurements["peak_memory_gb"] - measurements["empty_memory_gb"]) * 1e9,
        planned_memory=_planned_memory(overrides, ranks),
    )


def _planned_memory(overrides: list[str], ranks: int) -> float:
    from megadit.train.config.load import resolve_config
    from megadit.train.plan.layout import Layout
    from megadit.train.plan.memory import memory_of

    config = resolve_config(RECIPE, overrides=["data.mock=true", *overrides])
    return memory_of(config, Layout.of(config, ranks)).total


CURVES = (("seconds", "operations"), ("memory", "planned_memory"))
"""Measured quantity of a `Point`, and the predicted one that it is compared with."""


def exponents(points: Sequence[Point]) -> dict[str, Exponents]:
    """Return the exponents of every quantity of `CURVES`."""
    places = [point.place for point in points]
    return {name: Exponents.of(places, [getattr(point, name) for point in points]) for pair in CURVES for name in pair}


def draw(curves: dict[str, list[Point]], path: Path) -> None:
    """Plot time above and memory below; predictions are dashed (scaled to the last point)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measurement, rows = plt.subplots(2, len(curves), figsize=(4 * len(curves), 6), squeeze=False, layout="constrained")
    for column, (name, points) in enumerate(curves.items()):
        places, found = [point.place for point in points], exponents(points)
        for plot, (measured, demanded), label in zip(rows[:, column], CURVES, ("s of a processor", "GB"), strict=True):
            ours, theirs = ([getattr(point, kind) for point in points] for kind in (measured, demanded))
            unit = 1e9 if measured == "memory" else 1
            plot.loglog(places, [y / unit for y in ours], "o-", label=f"measured {found[measured]}")
            height, label_of_theirs = ours[-1] / theirs[-1] / unit, f"{demanded.replace('_', ' ')} {found[demanded]}"
            plot.loglog(places, [y * height for y in theirs], "k--", label=label_of_theirs)
            plot.set(xlabel=AXES[name].unit, ylabel=label)
            plot.legend(fontsize=7)
    with atomic_path(path) as temporary:
        measurement.savefig(temporary, dpi=100)
    plt.close(measurement)


def table_of(curves: dict[str, list[Point]]) -> Table:
    columns = ("along", "points", "time", "operations", "memory", "planned")
    table = Table(*columns, title="exponents (between the last two)")
    for name, points in curves.items():
        found = exponents(points)
        ends = f"{points[0].place:,.0f} to {points[-1].place:,.0f} {AXES[name].unit}"
        table.add_row(name, ends, *(str(found[kind]) for pair in CURVES for kind in pair))
    return table


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthOptions:
    folder: Path = setting(
        help="folder for growth.png, growth.json and the results of every run", positional=True, metavar="FOLDER"
    )
    along: tuple[str, ...] = setting(tuple(AXES), f"axes to measure: {', '.join(AXES)} (default: all)", metavar="NAME")
    steps: int = setting(3, "steps timed at each point (default: {default})", metavar="N")
    points: int | None = setting(
        None, "measure only the first N points of each axis (default: all)", low=2, metavar="N"
    )


@command(GrowthOptions, prog="megadit benchmark growth", description="Measures how a training step's cost grows.")
def main(options: GrowthOptions) -> None:
    for name in options.along:
        choose_one(name, AXES, f"--along {name}: nothing grows along that")
    options.folder.mkdir(parents=True, exist_ok=True)
    values = {name: AXES[name].values[: options.points] for name in options.along}
    curves: dict[str, list[Point]] = {name: [] for name in values}
    with Progress(sum(map(len, values.values())), "measuring") as bar:
        for name, several in values.items():
            for value in several:
                file = options.folder / f"{name}-{value}.json"
                curves[name].append(measure_point(AXES[name], value, file, options.steps))
                bar.advance()
    draw(curves, options.folder / "growth.png")
    measured = {name: [asdict(point) for point in curve] for name, curve in curves.items()}
    write_json(options.folder / "growth.json", measured)
    Console().print(table_of(curves))
    print(options.folder / "growth.png")
