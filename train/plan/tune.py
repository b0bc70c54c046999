"""`megadit train --tune`: measures the planner's best layouts on this machine, each in separate processes.

A layout that crashes, runs out of memory or hangs becomes a row of the table. Rows are saved as they come, so that the
same command continues after an interruption. Finally the planner's two constants are fitted to the measurements.
"""

import json
import math
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from megadit.models.machine import NO_MEMORY
from megadit.models.shared.cli.command import python_module
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path, read_json, write_json
from megadit.models.shared.progress import duration
from megadit.models.shared.resources import GIB
from megadit.train.config.load import change, to_yaml
from megadit.train.config.schema import RunConfig
from megadit.train.plan.estimate import H100_CALIBRATION, Calibration, estimate_step
from megadit.train.plan.hardware import Gpu
from megadit.train.plan.search import Choice, rank_layouts

Outcome = Literal["measured", "crashed", "out of memory", "hung"]
WARMUP = 2
KILLED = 137
"""Exit code of a process killed with SIGKILL, as the kernel does when memory runs out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Result of measuring one layout."""

    layout: str
    overrides: tuple[str, ...]
    outcome: Outcome
    predicted: float
    """Seconds of a step that the planner predicted before the measurement."""
    seconds: float | None = None
    """Median seconds of the timed steps."""
    memory_gb: float | None = None
    """Peak memory of the rank with the most."""
    said: str = ""
    """Last line of output, if it failed."""


def tune(config: RunConfig, gpu: Gpu, *, ranks: int, top: int, steps: int, seconds: float) -> Path:
    """Measure the planner's `top` best layouts on `ranks` ranks of this machine, and write the fastest.

    Args:
        gpu: hardware of a rank, for the planner.
        steps: number of timed steps per layout.
        seconds: timeout after which a layout counts as hung.

    Returns:
        The YAML file of the run in the fastest layout, under `train.output_dir`/tune.

    Raises:
        UserError: if no layout fits, or none could be measured, or the folder holds another run's rows.
    """
    choices = [choice for choice in rank_layouts(config, ranks, gpu) if choice.fits][:top]
    if not choices:
        raise UserError(f"no layout of {config.recipe} on {ranks} ranks of {gpu.name} fits; take more ranks")
    folder = Path(config.train.output_dir) / "tune"
    rows = _begin(folder, {"run": to_yaml(config), "ranks": ranks, "steps": steps})
    (folder / "run.yaml").write_text(to_yaml(config), encoding="utf-8")
    for number, choice in enumerate(choices, 1):
        known = next((row for row in rows if row.layout == str(choice.layout)), None)
        print(f"{number}/{len(choices)} {choice.layout}: {'already there' if known else 'measuring'}", flush=True)
        if known is None:
            rows.append(_measure(choice, folder, ranks, steps, seconds))
            write_json(folder / "rows.json", [asdict(row) for row in rows])
    rows.sort(key=lambda row: (row.seconds is None, row.seconds or 0.0))
    _print_rows(rows)
    best = rows[0]
    if best.seconds is None:
        raise UserError(f"none of {len(rows)} layouts could be measured; {folder}/*.log say why")
    _keep_calibration(config, gpu, choices, rows, folder)
    path = folder / "best.yaml"
    with atomic_path(path) as temporary:
        temporary.write_text(to_yaml(change(config, overrides=list(best.overrides))), encoding="utf-8")
    print(f"best: {best.layout}; megadit train --config-file {path} --nproc {ranks}")
    return path


def _begin(folder: Path, request: dict[str, object]) -> list[Row]:
    """Saved rows of an earlier run of the same command."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = folder / "request.json"
    if asked.is_file() and read_json(asked) != request:
        raise UserError(f"{folder} holds the rows of another run, or of other ranks or steps; remove it to begin anew")
    write_json(asked, request)
    path = folder / "rows.json"
    return [Row(**{**row, "overrides": tuple(row["overrides"])}) for row in read_json(path)] if path.is_file() else []


def _measure(choice: Choice, folder: Path, ranks: int, steps: int, seconds: float) -> Row:
    overrides = choice.layout.overrides()
    name = "".join(letter if letter.isalnum() else "-" for letter in str(choice.layout))
    numbers, log = folder / f"{name}.json", folder / f"{name}.log"
    numbers.unlink(missing_ok=True)
    code = _run_process(command(folder / "run.yaml", overrides, ranks, steps, numbers), log, seconds)
    row = Row(layout=str(choice.layout), overrides=tuple(overrides), outcome="measured", predicted=choice.time.total)
    if code == 0:
        measured = json.loads(numbers.read_text(encoding="utf-8"))["measurements"]
        return replace(row, seconds=measured["seconds"], memory_gb=measured["peak_memory_gb"])
    if code is None:
        return replace(row, outcome="hung", said=f"no end after {duration(seconds)}")
    text = log.read_text(encoding="utf-8", errors="replace")
    has_no_memory = code == KILLED or any(words in text for words in NO_MEMORY)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return replace(row, outcome="out of memory" if has_no_memory else "crashed", said=lines[-1] if lines else "")


def command(run: Path, overrides: Sequence[str], ranks: int, steps: int, numbers: Path) -> list[str]:
    """Command that measures one layout."""
    return [
        *python_module("megadit.train.benchmarks.train", "--config-file", str(run), *overrides),
        *("--nproc", str(ranks), "--steps", str(steps), "--warmup", str(WARMUP), "--json", str(numbers)),
    ]


def _run_process(words: list[str], log: Path, seconds: float) -> int | None:
    """Exit code of the process; None if it was killed at the timeout."""
    with open(log, "wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:  # also ends its ranks
            _end_group(process)


def _end_group(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _keep_calibration(config: RunConfig, gpu: Gpu, choices: list[Choice], rows: list[Row], folder: Path) -> None:
    """Save the planner's constants fitted to the rows, with their errors."""
    seconds = {row.layout: row.seconds for row in rows if row.seconds is not None}
    layouts = [choice.layout for choice in choices if str(choice.layout) in seconds]
    measured = [seconds[str(layout)] for layout in layouts]
    fitted = fit_measured(
        lambda constants: [estimate_step(config, layout, gpu, constants).total for layout in layouts], measured
    )
    write_json(
        folder / "calibration.json",
        {
            "gpu": asdict(gpu),
            "before": asdict(H100_CALIBRATION),
            "fitted": asdict(fitted),
            "rows": {
                str(layout): {"measured": took, "fitted": estimate_step(config, layout, gpu, fitted).total}
                for layout, took in zip(layouts, measured, strict=True)
            },
        },
    )


def _print_rows(rows: list[Row]) -> None:
    table = Table(box=None)
    for name in ("", "layout", "s/step", "planner", "GiB", ""):
        table.add_column(name, justify="left" if name in ("layout", "") else "right")
    for number, row in enumerate(rows, 1):
        took = "" if row.seconds is None else f"{row.seconds:.3g}"
        memory = "" if row.memory_gb is None else f"{row.memory_gb * 1e9 / GIB:.2f}"
        said = "" if row.outcome == "measured" else f"{row.outcome}: {row.said}"[:80]
        table.add_row(str(number), row.layout, took, f"{row.predicted:.3g}", memory, said)
    Console(width=160).print(table)


def fit_measured(predict: Callable[[Calibration], Sequence[float]], measured: Sequence[float]) -> Calibration:
    """Constants with the least squared error of log seconds (Gauss-Newton in their logarithms).

    If the measurements do not determine both, they change by the same factor.

    Args:
        predict: function from constants to the seconds of all measurements.
    """

    def errors(logs: np.ndarray) -> np.ndarray:
        return np.log(predict(_constants(logs))) - np.log(measured)

    logs = np.log([0.5, 0.5])
    for _ in range(10):
        now = errors(logs)
        slopes = np.stack([(errors(logs + step) - now) / 1e-3 for step in 1e-3 * np.eye(2)], axis=1)
        change = np.linalg.lstsq(slopes, -now, rcond=1e-2)[0]
        logs = np.clip(logs + np.clip(change, -1, 1), math.log(1e-4), math.log(2.0))
        if np.abs(change).max() < 1e-4:
            break
    return _constants(logs)


def _constants(logs: np.ndarray) -> Calibration:
    return Calibration(matmul=math.exp(logs[0]), attention=math.exp(logs[1]))
