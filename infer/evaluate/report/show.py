"""Writes the results of an evaluation into its folder: report.json, report.html, grid.png, curves.png."""

import sys
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np

from megadit.infer.evaluate.evaluation import Candidate, Difference, Evaluation, MetricValue
from megadit.infer.evaluate.report.pictures import draw_curves, extremes, has_curve, paired_grid
from megadit.infer.evaluate.report.report import REPORT_FILE, label_of, shown, table, to_json
from megadit.infer.media.animations import encode_animation, encode_image
from megadit.infer.media.contact_sheet import middle_frame
from megadit.infer.media.pages import embedded, write_html
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
        curves = iio.imread(out / "curves.png")[None, ..., :3]
        shows.append(("Quality and prompts", "Bars are 95 % intervals.", curves, 0))
    grid = paired_grid(candidates, window)
    write_video(out / "grid.png", middle_frame(grid))
    shows.append(("The same prompts and seeds", "A row for each model and guidance.", grid, window.fps))
    for candidate in candidates[:MOST_EXTREMES]:
        if (found := extremes(candidate, evaluation)) is not None:
            sheet, name = found
            heading = f"Best and worst of {candidate.label}"
            shows.append((heading, f"Best above, worst below, by {name}.", sheet, window.fps))
    report = to_json(evaluation, metric_values, differences, seconds)
    write_page(out / "report.html", report, shows)
    write_json(out / REPORT_FILE, report)
    print(table(report["metrics"]))
    print(out / "report.html")


# --- report.html: a self-contained page of an evaluation --------------------------------------------------------------


def write_page(path: Path, report: dict[str, Any], shows: Sequence[tuple[str, str, np.ndarray, float]]) -> None:
    """Writes the page.

    Args:
        shows: (heading, explanation, frames THWC uint8, frames per second) of each picture or video below the tables.
    """
    body = [
        f"<h1>{escape(_title(report))}</h1>",
        f'<p class="faint">{escape(_subtitle(report))}</p>',
        _metric_values(report["metrics"]),
        _differences(report["differences"]),
        *(_shown(*show) for show in shows),
        _protocols(report["metrics"]),
    ]
    write_html(path, "Evaluation", body)


def _title(report: dict[str, Any]) -> str:
    models = list(dict.fromkeys(metric_value["model"] for metric_value in report["metrics"]))
    return f"Evaluation of {' and '.join(models)}"


def _subtitle(report: dict[str, Any]) -> str:
    real = report["real"]
    against = f"; {real['videos']} real videos of {real['label']}" if real else ""
    return f"{report['window']}{against}; intervals: {report['interval']}"


def _metric_values(metric_values: Sequence[dict[str, Any]]) -> str:
    head = (
        '<tr><th>metric<th>of<th class="number">value<th class="number">95 % interval<th class="number">real against '
        'real<th class="number">videos<th>also'
    )
    rows, last = [], None
    for metric_value in sorted(metric_values, key=lambda each: (each["metric"], each["of"])):
        name = (metric_value["metric"], metric_value["of"])
        arrow = "lower is better" if metric_value["better"] == "lower" else "higher is better"
        title = f"<small>{escape(metric_value['title'])}; {arrow}</small>"
        what = f"<b>{escape(name[0])}</b> by {escape(name[1])}<br>{title}"
        extra = ", ".join(f"{key} {shown(value)}" for key, value in metric_value["extra"].items())
        note = f'<br><span class="bad">{escape(metric_value["note"])}</span>' if metric_value["note"] else ""
        real = metric_value["baseline"]
        baseline = f"{shown(real['low'])} to {shown(real['high'])}" if real else ""
        rows.append(
            f"<tr><td>{what if name != last else ''}<td>{escape(label_of(metric_value))}"
            f'<td class="number"><b>{shown(metric_value["value"])}</b>'
            f'<td class="number">{shown(metric_value["low"])} to {shown(metric_value["high"])}'
            f'<td class="number">{baseline}<td class="number">{metric_value["videos"]}'
            f"<td><small>{escape(extra)}</small>{note}"
        )
        last = name
    return f"<h2>Figures</h2><table>{head}{''.join(rows)}</table>"


def _differences(differences: Sequence[dict[str, Any]]) -> str:
    if not differences:
        return ""
    rows = []
    for each in differences:
        verdict = f'<b class="good">{escape(each["better"])}</b>' if each["better"] else "cannot be told apart"
        rows.append(
            f"<tr><td><b>{escape(each['metric'])}</b> by {escape(each['of'])}<td>{escape(each['first'])} less "
            f'{escape(each["second"])}<td class="number">{shown(each["value"])}'
            f'<td class="number">{shown(each["low"])} to {shown(each["high"])}<td>{verdict}'
        )
    head = '<tr><th>metric<th>of<th class="number">difference<th class="number">95 % interval<th>better'
    explained = "Same prompts and seeds; the intervals are paired."
    return f"<h2>Differences</h2><p>{explained}</p><table>{head}{''.join(rows)}</table>"


def _shown(heading: str, explanation: str, frames_THWC: np.ndarray, fps: float) -> str:
    if len(frames_THWC) == 1:
        kind, content = "png", encode_image(frames_THWC[0], ".png")
    else:
        kind, content = "webp", encode_animation(frames_THWC, fps or 8.0, ".webp")
    picture = embedded(content, f"image/{kind}", heading)
    return f"<h2>{escape(heading)}</h2><p>{escape(explanation)}</p>{picture}"


def _protocols(metric_values: Sequence[dict[str, Any]]) -> str:
    protocols = dict.fromkeys(each["protocol"] for each in metric_values)
    lines = "".join(f"<li><code>{escape(line)}</code>" for line in protocols)
    return (
        "<h2>Protocols</h2><p>Metrics can be compared if their protocols are identical. Fréchet distances are "
        "extrapolated to infinitely many videos; the last column has the plain ones."
        f"</p><ul>{lines}</ul>"
    )
