"""Plots metrics.jsonl of a run to its curves.png.

    python -m megadit.train.monitoring.curves RUN

draws it once; with --follow (used by a running training) once more for each line of standard input, until "end" or the
end of input. Nothing here needs torch.
"""

import json
import os
import sys
from collections.abc import Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from megadit.models.shared.documents import MAX_BYTES, check_size
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path

CURVES_FILE = "curves.png"
BACKGROUND, TEXT, FAINT, GRID = "#101216", "#e8eaed", "#8a919c", "#2a2e36"
"""Colours of plots with frames of videos."""
PAPER, INK, PALE, LINE = "#ffffff", "#23272e", "#6b7380", "#d4d8de"
"""Colours of plots of curves, which are shown on light pages."""

FOLLOW, AGAIN, END = "--follow", "again\n", "end\n"
"""The option --follow, and the lines that it accepts on standard input."""


def main(argv: list[str] | None = None) -> int:
    """Draw the curves of one run, at low priority."""
    run, *options = sys.argv[1:] if argv is None else argv
    os.nice(10)
    metrics = MetricsFile(Path(run) / "metrics.jsonl")
    asked = sys.stdin if options == [FOLLOW] else ()
    num_drawn = -1
    for _ in chain([AGAIN], takewhile(lambda line: line != END, asked)):
        records = metrics.read()
        if len(records) > num_drawn:  # requests that came while drawing are answered by one drawing
            training_curves(Path(run) / CURVES_FILE, records, title=run)
            num_drawn = len(records)
    return 0


class MetricsFile:
    """Values of the plotted metrics from metrics.jsonl, read incrementally."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._records: list[dict] = []

    def read(self) -> list[dict]:
        """Return the records of all steps so far; only new lines are read, and an incomplete last line is ignored.
        Raises UserError if the file is missing."""
        if not self._path.is_file():
            raise UserError(f"{self._path} does not exist; is its folder that of a training run?")
        with self._path.open("rb") as file:
            file.seek(self._read)
            while (line := file.readline(MAX_BYTES)).endswith(b"\n"):
                record = self._record(line)
                self._records.append({name: record[name] for name in DRAWN if name in record})
                self._read += len(line)
        check_size(len(line), f"a line of {self._path}", MAX_BYTES - 1)
        return self._records

    def _record(self, line: bytes) -> dict:
        try:
            record = json.loads(line)
            record["step"]
        except (ValueError, RecursionError, TypeError, KeyError):
            raise UserError(f"{self._path} has a line that is no record of a step: {line[:60]!a}") from None
        return record


def series(records: Sequence[dict], *keys: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one metric, where it was recorded; repeated steps count once.

    Several `keys` lead into nested objects: `series(records, "validation", "none", "mean")`.
    """
    by_step = {record["step"]: _value_at(record, keys) for record in records}
    steps = sorted(step for step, value in by_step.items() if value is not None)
    return np.array(steps), np.array([by_step[step] for step in steps], dtype=float)


def _value_at(record: dict, keys: Sequence[str]) -> float | None:
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` values (fewer at the start)."""
    total = np.cumsum(np.concatenate([[0.0], values]))
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - window, 0)
    return (total[last] - total[first]) / (last - first)


PANELS = (
    ("loss", "training loss", "linear"),
    ("validation", "validation loss of the weights and EMA weights", "linear"),
    ("lr", "learning rate", "linear"),
    ("grad_norm", "gradient norm", "log"),
    ("tokens_per_s", "tokens per second", "linear"),
    ("imbalance", "work of the busiest rank over the mean", "linear"),
)
"""Key in metrics.jsonl, title and scale of each panel."""
DRAWN = ("step", *(name for name, _, _ in PANELS))
COLOURS = ("#4c8dff", "#5dd39e", "#f2c14e", "#ff6b6b", "#b388ff", "#8a919c")


def training_curves(path: Path, records: Sequence[dict], *, title: str) -> None:
    """Draw all panels that have values: faint lines as measured, bold ones as moving means."""
    from matplotlib.figure import Figure

    lines = {name: _lines(records, name) for name, _, _ in PANELS}
    panels = [panel for panel in PANELS if lines[panel[0]]]
    figure = Figure(figsize=(4.0 * max(len(panels), 1), 3.4), facecolor=PAPER, layout="constrained")
    figure.suptitle(title, color=INK, fontsize=12, x=0.01, ha="left")
    axes = figure.subplots(1, max(len(panels), 1), squeeze=False)[0]
    for axis, (name, label, scale) in zip(axes, panels, strict=False):
        _draw_panel(axis, lines[name], label, scale)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110, facecolor=PAPER)


def _lines(records: Sequence[dict], name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Lines of one panel by label: one for a plain metric, one per EMA profile for validation."""
    kinds = sorted({kind for record in records if isinstance(record.get(name), dict) for kind in record[name]})
    paths = {kind: (name, kind, "mean") for kind in kinds} or {"": (name,)}
    lines = {label: series(records, *keys) for label, keys in paths.items()}
    return {label: line for label, line in lines.items() if len(line[0])}


def _draw_panel(axis, lines: dict[str, tuple[np.ndarray, np.ndarray]], label: str, scale: str) -> None:
    axis.set_facecolor(PAPER)
    axis.set_title(label, color=INK, fontsize=10, loc="left")
    axis.set_yscale(scale)
    for colour, (name, (steps, values)) in zip(COLOURS, lines.items(), strict=False):
        if len(values) < 50:
            axis.plot(steps, values, color=colour, lw=1.2, marker="o", ms=3, label=name)
            continue
        axis.plot(steps, values, color=colour, alpha=0.3, lw=0.8)
        axis.plot(steps, smooth(values, max(len(values) // 50, 5)), color=colour, lw=1.8, label=name)
        if scale == "linear":
            _leave_out_start(axis, values)
    if len(lines) > 1:
        axis.legend(fontsize=7, labelcolor=PALE, facecolor=PAPER, edgecolor=LINE)
    axis.set_xlabel("step", color=PALE, fontsize=8)
    axis.tick_params(which="both", colors=PALE, labelsize=8)
    axis.grid(alpha=0.25)
    for side in axis.spines.values():
        side.set_color(LINE)


def _leave_out_start(axis, values: np.ndarray) -> None:
    """Scale the axis without the first steps, whose values would flatten the others."""
    low, high = np.quantile(values[len(values) // 50 :], [0, 0.999])
    margin = 0.05 * (high - low) + 1e-12
    axis.set_ylim(low - margin, high + margin)


if __name__ == "__main__":
    raise SystemExit(main())
