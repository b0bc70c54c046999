"""Writes the results of an evaluation into its folder: report.json, report.html, grid.png, curves.png."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import imageio.v3 as iio

from megadit.infer.evaluate.evaluation import Candidate, Difference, Evaluation, MetricValue
from megadit.infer.evaluate.report.page import write_page
from megadit.infer.evaluate.report.pictures import draw_curves, extremes, has_curve, paired_grid
from megadit.infer.evaluate.report.report import REPORT_FILE, table, to_json
from megadit.infer.media.contact_sheet import middle_frame
from megadit.infer.media.video_io import write_video
from megadit.models.shared.files import write_json

MOST_EXTREMES = 4
"""Candidates whose best and worst videos are shown."""


def write_report(
    out: Path,
    evaluation: Evaluation,
    candidates: Sequence[Candidate],
    metric_values: Sequence[MetricValue],
    differences: Sequence[Difference],
    seconds: dict[str, float],
) -> None:
    """Writes all files, report.json last, and prints the table."""
    window, shows = evaluation.store.window, []
    if has_curve(metric_values) and find_spec("matplotlib") is None:
        print("no curves.png: matplotlib is not installed (pip install 'megadit[evaluate]')", file=sys.stderr)
    elif has_curve(metric_values):
        draw_curves(out / "curves.png", metric_values)
        shows.append(
            ("Quality and prompts", "Bars are 95 % intervals.", iio.imread(out / "curves.png")[None, ..., :3], 0)
        )
    grid = paired_grid(candidates, window)
    write_video(out / "grid.png", middle_frame(grid))
    shows.append(("The same prompts and seeds", "A row for each model and guidance.", grid, window.fps))
    for candidate in candidates[:MOST_EXTREMES]:
        if (found := extremes(candidate, evaluation)) is None:
            continue
        sheet, name = found
        shows.append(
            (f"Best and worst of {candidate.label}", f"Best above, worst below, by {name}.", sheet, window.fps)
        )
    report = to_json(evaluation, metric_values, differences, seconds)
    write_page(out / "report.html", report, shows)
    write_json(out / REPORT_FILE, report)
    print(table(report["metrics"]))
    print(out / "report.html")
