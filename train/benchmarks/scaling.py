"""`megadit benchmark scaling`: samples per second on more ranks, compared with linear scaling, as table and plot.

    megadit benchmark scaling FOLDER --recipe digits --ranks 1,2,4,8 [section.key=value ...]
    torchrun --nnodes 2 --nproc-per-node 8 -m megadit.train.benchmarks.train --recipe NAME \\
        --json FOLDER/ranks-16.json data.global_batch_size=16         # a row that this machine cannot measure

Every data-parallel rank has the same work in each row (`--packs` a step: weak scaling). Each row is a run of `megadit
benchmark train`, whose results are saved in FOLDER, so that a second call measures only missing rows. Rows of more
ranks than devices here count as not measured, unless their results are copied from another machine. A row measured with
another configuration or other `--steps` is refused.
"""

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megadit.models.shared.cli.command import python_module
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path, differences, read_json, write_json
from megadit.models.shared.resources import available_cores
from megadit.train.benchmarks.train import run_of
from megadit.train.config.load import resolve_config
from megadit.train.config.rules import check_layout

NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingOptions:
    folder: Path = setting(
        help="folder for scaling.json, scaling.svg and the results of every row", positional=True, metavar="FOLDER"
    )
    overrides: tuple[str, ...] = setting((), "change single values", positional=True, metavar="section.key=value")
    recipe: str = setting("digits", "recipe whose steps are timed (default: {default})", metavar="NAME")
    ranks: str = setting("1,2,4,8", "numbers of ranks, one row each (default: {default})", metavar="N,N")
    packs: int = setting(1, "packs of each data-parallel rank in a step (default: {default})", low=1, metavar="N")
    steps: int = setting(10, "steps timed for each row (default: {default})", low=1, metavar="N")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Throughput on a number of ranks; None: not measured."""

    ranks: int
    samples_per_second: float | None


def ideal(rows: list[Row], ranks: int) -> float | None:
    """Samples per second at linear scaling from the smallest measured row; None if nothing was measured."""
    measured = [row for row in rows if row.samples_per_second is not None]
    return measured[0].samples_per_second * ranks / measured[0].ranks if measured else None


def devices_here() -> int:
    """Number of ranks that can have a device of their own."""
    import torch

    return torch.cuda.device_count() or available_cores()


def measure(options: ScalingOptions, ranks: int, devices: int) -> Row:
    """A row, from its file where that is there. Raises UserError if its run failed, with its last line; if the file has
    results of another run."""
    file = options.folder / f"ranks-{ranks}.json"
    if not file.is_file():
        if ranks > devices:
            return Row(ranks=ranks, samples_per_second=None)
        command = python_module("megadit.train.benchmarks.train", "--recipe", options.recipe)
        command += ["--steps", str(options.steps), "--json", str(file), *overrides_of(options, ranks)]
        done = subprocess.run([*command, "--nproc", str(ranks)], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{ranks} ranks: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    record = read_json(file)
    if (record["recipe"], record["machine"]["ranks"]) != (options.recipe, ranks):
        raise UserError(f"{file} has results of {record['recipe']} on {record['machine']['ranks']} ranks; delete it")
    config = asdict(run_of(options.recipe, None, overrides_of(options, ranks)))
    asked = json.loads(json.dumps(config | {"steps": options.steps}))
    if not {"config", "steps"} <= record.keys():
        raise UserError(f"{file} does not say with which settings it was measured; delete it")
    for name, there, here in differences(record["config"] | {"steps": record["steps"]}, asked):
        raise UserError(f"{file} has results of a run with {name}={there}, not {here}; delete it, or use the same")
    measurements = record["measurements"]
    return Row(ranks=ranks, samples_per_second=measurements["samples_per_step"] / measurements["seconds"])


def overrides_of(options: ScalingOptions, ranks: int) -> list[str]:
    """Overrides of a row: its global batch has `options.packs` micro-batches for each copy of the model. Raises
    UserError if the ranks cannot be divided among copies."""
    config = resolve_config(options.recipe, overrides=["data.mock=true", *options.overrides])
    copies = max(1, ranks // config.parallel.sizes.model_parallel_size)
    batch = f"data.global_batch_size={options.packs * copies * config.data.micro_batch_size}"
    check_layout(resolve_config(options.recipe, overrides=["data.mock=true", *options.overrides, batch]), ranks)
    return [*options.overrides, batch]


def rows_asked_for(text: str) -> list[int]:
    """`4,1` is 1 and 4. Raises UserError for anything but numbers from 1."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"--ranks {text}: write numbers of ranks, such as 1,2,4,8")
    return sorted({int(part) for part in parts})


def table_of(rows: list[Row]) -> Table:
    table = Table("ranks", "samples/s", "ideal", "speedup", "of ideal")
    for row in rows:
        found, best = row.samples_per_second, ideal(rows, row.ranks)
        first = None if best is None else best / row.ranks
        table.add_row(
            str(row.ranks),
            NOT_MEASURED if found is None else f"{found:,.2f}",
            NOT_MEASURED if best is None else f"{best:,.2f}",
            NOT_MEASURED if found is None else f"{found / first:.2f}",
            NOT_MEASURED if found is None else f"{found / best:.0%}",
        )
    return table


def draw(rows: list[Row], title: str, path: Path) -> None:
    """Measured rows as a line, the ideal dashed, and a mark on the axis where nothing was measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = [row for row in rows if row.samples_per_second is not None]
    measurement, plot = plt.subplots(figsize=(6, 4), layout="constrained")
    places = [row.ranks for row in rows]
    if measured:
        plot.loglog(places, [ideal(rows, ranks) for ranks in places], "k--", label="ideal")
        rates = [row.samples_per_second for row in measured]
        plot.loglog([row.ranks for row in measured], rates, "o-", label="measured")
    for row in rows:
        if row.samples_per_second is None:
            plot.axvline(row.ranks, color="0.8", label=f"{row.ranks}: {NOT_MEASURED}")
    plot.set(xlabel="ranks", ylabel="samples/s", title=title, xticks=places, xticklabels=places)
    plot.legend()
    with atomic_path(path) as temporary:
        measurement.savefig(temporary, format=path.suffix[1:])
    plt.close(measurement)


@command(
    ScalingOptions,
    prog="megadit benchmark scaling",
    description="Measures samples per second by number of ranks; rows that this machine cannot run say `not measured`.",
)
def main(options: ScalingOptions) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    counts = rows_asked_for(options.ranks)
    for ranks in counts:
        overrides_of(options, ranks)  # checked before anything is measured
    devices, rows = devices_here(), []
    for ranks in counts:
        rows.append(measure(options, ranks, devices))
        print(f"{ranks} ranks: {rows[-1].samples_per_second or NOT_MEASURED}", flush=True)
    values = [{"ranks": row.ranks, "samples_per_second": row.samples_per_second} for row in rows]
    write_json(options.folder / "scaling.json", {"recipe": options.recipe, "packs": options.packs, "rows": values})
    draw(rows, f"{options.recipe}, packs of a copy in a step: {options.packs}", options.folder / "scaling.svg")
    Console().print(table_of(rows))
    print(options.folder / "scaling.svg")
