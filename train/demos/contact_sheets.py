"""Contact sheets of clips."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megadit.models.shared.files import atomic_path
from megadit.train.demos.clips import as_uint8
from megadit.train.monitoring.curves import BACKGROUND, TEXT

RIGHT, WRONG, NOTE = "#5dd39e", "#ff6b6b", "#f2c14e"


@dataclass(frozen=True, slots=True)
class SheetRow:
    """One clip of the contact sheet."""

    caption: str
    video_CTHW: Tensor
    """Clip in [-1, 1]."""
    is_right: dict[str, bool] = field(default_factory=dict)
    """Verdicts of the classifier on the clip, in the order of display."""
    note: str = ""


def contact_sheet(path: Path, rows: Sequence[SheetRow], *, title: str, columns: int = 2) -> None:
    """Draw each clip as a strip of its frames, under its caption and the classifier's verdicts."""
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
    frames_THWC = as_uint8(video_CTHW).permute(1, 2, 3, 0)
    num_frames, height, width, _ = frames_THWC.shape
    background = torch.tensor([int(BACKGROUND[i : i + 2], 16) for i in (1, 3, 5)], dtype=torch.uint8)
    strip = background.expand(height, num_frames * (width + gap) - gap, 3).clone()
    for number, frame_HWC in enumerate(frames_THWC):
        strip[:, number * (width + gap) : number * (width + gap) + width] = frame_HWC
    return strip.numpy()
