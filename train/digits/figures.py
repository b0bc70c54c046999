"""The pictures the demo leaves: a contact sheet of clips, and the curves of training."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path

BACKGROUND, TEXT, FAINT, GRID = "#101216", "#e8eaed", "#8a919c", "#2a2e36"
RIGHT, WRONG, NOTE = "#5dd39e", "#ff6b6b", "#f2c14e"


@dataclass(frozen=True, kw_only=True, slots=True)
class SheetRow:
    """One clip of the contact sheet."""

    caption: str
    video_CTHW: Tensor
    """In [-1, 1]."""
    is_right: dict[str, bool]
    """What the judge says of the clip, in the order to be shown."""
    note: str = ""


def contact_sheet(path: Path, rows: Sequence[SheetRow], *, title: str, columns: int = 2) -> None:
    """Draws each clip as a strip of its frames, left to right in time, under its caption and the judge's verdict."""
    from matplotlib.figure import Figure

    per_column = -(-len(rows) // columns)
    figure = Figure(figsize=(7.2 * columns, 1.06 * per_column + 0.8), facecolor=BACKGROUND)
    axes = figure.subplots(per_column, columns, squeeze=False)
    inch = 1 / figure.get_figheight()
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.1 * inch, top=1 - 0.85 * inch, hspace=0.42, wspace=0.03)
    figure.suptitle(title, color=TEXT, fontsize=13, x=0.012, ha="left", y=1 - 0.22 * inch)
    for axis in axes.flat:
        axis.axis("off")
    for axis, row in zip(axes.T.flat, rows, strict=False):
        _draw_row(axis, row)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110, facecolor=BACKGROUND)


def spread(numbers: range, count: int) -> list[int]:
    """`count` of the numbers at equal distances, or all where there are fewer."""
    count = min(count, len(numbers))
    return [numbers[i * len(numbers) // count] for i in range(count)]


def _draw_row(axis, row: SheetRow) -> None:
    axis.imshow(_strip(row.video_CTHW), interpolation="nearest")
    axis.text(0, 1.05, row.caption, transform=axis.transAxes, color=TEXT, fontsize=10, va="bottom")
    place = 1.0
    for name, is_right in reversed(row.is_right.items()):
        mark, colour = ("\u2713", RIGHT) if is_right else ("\u2717", WRONG)
        text = f"{name} {mark}"
        axis.text(place, 1.05, text, transform=axis.transAxes, color=colour, fontsize=8.5, va="bottom", ha="right")
        place -= 0.0135 * (len(text) + 1.5)
    if row.note:
        axis.text(place, 1.05, row.note, transform=axis.transAxes, color=NOTE, fontsize=8.5, va="bottom", ha="right")


def _strip(video_CTHW: Tensor, gap: int = 2) -> np.ndarray:
    """Frames side by side, RGB uint8 HWC, with a gap in the background's colour."""
    frames_THWC = ((video_CTHW.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0)
    num_frames, height, width, _ = frames_THWC.shape
    background = torch.tensor([int(BACKGROUND[i : i + 2], 16) for i in (1, 3, 5)], dtype=torch.uint8)
    strip = background.expand(height, num_frames * (width + gap) - gap, 3).clone()
    for number, frame_HWC in enumerate(frames_THWC):
        strip[:, number * (width + gap) : number * (width + gap) + width] = frame_HWC
    return strip.numpy()


def read_metrics(path: Path) -> list[dict]:
    """The objects of a metrics.jsonl, one a line; a last line cut short by a kill is left out.

    Raises:
        UserError: if the file is missing.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; is its folder that of a training run?")
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def series(records: Sequence[dict], *keys: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one metric, where it was recorded; a step told twice counts once.

    Several `keys` lead into nested objects: `series(records, "validation", "none", "mean")`.
    """
    by_step = {record["step"]: _look_up(record, keys) for record in records}
    steps = sorted(step for step, value in by_step.items() if value is not None)
    return np.array(steps), np.array([by_step[step] for step in steps], dtype=float)


def _look_up(record: dict, keys: Sequence[str]) -> float | None:
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
    ("validation", "validation loss of the weights and their averages", "linear"),
    ("lr", "learning rate", "linear"),
    ("grad_norm", "gradient norm", "log"),
    ("tokens_per_s", "tokens per second", "linear"),
)
"""Key in metrics.jsonl, title and scale of each panel."""
COLOURS = ("#4c8dff", "#5dd39e", "#f2c14e", "#ff6b6b", "#b388ff", "#8a919c")


def training_curves(path: Path, records: Sequence[dict], *, title: str) -> None:
    """Draws every panel that the metrics have values for: faint as measured, bold as a moving mean."""
    from matplotlib.figure import Figure

    lines = {name: _lines(records, name) for name, _, _ in PANELS}
    panels = [panel for panel in PANELS if lines[panel[0]]]
    figure = Figure(figsize=(4.0 * max(len(panels), 1), 3.4), facecolor=BACKGROUND, layout="constrained")
    figure.suptitle(title, color=TEXT, fontsize=12, x=0.01, ha="left")
    axes = figure.subplots(1, max(len(panels), 1), squeeze=False)[0]
    for axis, (name, label, scale) in zip(axes, panels, strict=False):
        _draw_panel(axis, lines[name], label, scale)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110, facecolor=BACKGROUND)


def _lines(records: Sequence[dict], name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The lines of one panel by label: one for a number, one for each kind of weights where there are several."""
    kinds = sorted({kind for record in records if isinstance(record.get(name), dict) for kind in record[name]})
    paths = {kind: (name, kind, "mean") for kind in kinds} or {"": (name,)}
    lines = {label: series(records, *keys) for label, keys in paths.items()}
    return {label: line for label, line in lines.items() if len(line[0])}


def _draw_panel(axis, lines: dict[str, tuple[np.ndarray, np.ndarray]], label: str, scale: str) -> None:
    axis.set_facecolor(BACKGROUND)
    axis.set_title(label, color=TEXT, fontsize=10, loc="left")
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
        axis.legend(fontsize=7, labelcolor=FAINT, facecolor=BACKGROUND, edgecolor=GRID)
    axis.set_xlabel("step", color=FAINT, fontsize=8)
    axis.tick_params(which="both", colors=FAINT, labelsize=8)
    axis.grid(alpha=0.12)
    for side in axis.spines.values():
        side.set_color(GRID)


def _leave_out_start(axis, values: np.ndarray) -> None:
    """Scales the axis to all but the first steps, which would flatten what follows."""
    low, high = np.quantile(values[len(values) // 50 :], [0, 0.999])
    margin = 0.05 * (high - low) + 1e-12
    axis.set_ylim(low - margin, high + margin)
