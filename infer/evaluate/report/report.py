"""Results of an evaluation: report.json, a table for the terminal, and `megadit evaluate compare` of several."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadit.infer.evaluate.evaluation import Difference, Evaluation, MetricValue, check_same_protocol
from megadit.infer.evaluate.metrics.intervals import NUM_RESAMPLINGS, Estimate
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json

FORMAT_VERSION = 1
REPORT_FILE = "report.json"


def to_json(
    evaluation: Evaluation,
    metric_values: Sequence[MetricValue],
    differences: Sequence[Difference],
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The contents of report.json; everything except `seconds` is reproducible."""
    real = evaluation.real
    return {
        "format_version": FORMAT_VERSION,
        "window": evaluation.store.window.text,
        "real": None if real is None else {"label": real.label, "key": real.key, "videos": real.count},
        "interval": f"95 %, {NUM_RESAMPLINGS} resamplings of prompts with their videos",
        "metrics": [_metric_value(metric_value) for metric_value in metric_values],
        "differences": [
            {
                "first": each.first.candidate.label,
                "second": each.second.candidate.label,
                "metric": each.first.metric,
                "of": each.first.of,
                **interval_of(each.estimate),
                "better": each.winner,
            }
            for each in differences
        ],
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }


def _metric_value(metric_value: MetricValue) -> dict[str, Any]:
    return {
        "model": metric_value.candidate.model,
        "guidance": metric_value.candidate.guidance,
        "metric": metric_value.metric,
        "title": metric_value.title,
        "of": metric_value.of,
        "better": metric_value.better,
        **interval_of(metric_value.estimate),
        "videos": metric_value.estimate.count,
        "extra": {name: _rounded(value) for name, value in metric_value.estimate.extra.items()},
        "baseline": None if metric_value.baseline is None else interval_of(metric_value.baseline),
        "note": metric_value.note,
        "protocol": metric_value.protocol,
    }


def interval_of(estimate: Estimate) -> dict[str, float]:
    """{"value", "low", "high"} of a metric."""
    low, high = estimate.interval
    return {"value": _rounded(estimate.value), "low": _rounded(low), "high": _rounded(high)}


def _rounded(value: float) -> float:
    """Round to six digits: further ones depend on the order of additions."""
    return float(f"{value:.6g}")


# ----------------------------------------------------------------------------------------------------------- reading


def read_report(path: Path) -> dict[str, Any]:
    """Read a report.json, or that of a folder. Raises UserError if it is not a report."""
    file = path / REPORT_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file} does not exist; give an OUT of `megadit evaluate BUNDLE --real DATA --out OUT`")
    report = read_json(file)
    is_report = isinstance(report, dict) and isinstance(report.get("metrics"), list)
    if not is_report or report.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{file} is not a report of `megadit evaluate` of this version")
    return report


def side_by_side(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics of several reports in one list, those of one metric and extractor next to each other. Raises UserError if
    their protocols differ."""
    by_name: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for report in reports:
        for metric_value in report["metrics"]:
            others = by_name.setdefault((metric_value["metric"], metric_value["of"]), [])
            if others:
                check_same_protocol(others[0]["protocol"], metric_value["protocol"])
            others.append(metric_value)
    return [metric_value for metric_values in by_name.values() for metric_value in metric_values]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Metrics of a report as a table, a line each."""
    cells = [("model", "metric", "", "value", "95 % interval", "real against real", "videos")]
    for row in rows:
        name, arrow = f"{row['metric']} ({row['of']})", "v" if row["better"] == "lower" else "^"
        baseline = shown(row["baseline"]["value"]) if row["baseline"] else ""
        interval = f"{shown(row['low'])} to {shown(row['high'])}"
        cells.append((label_of(row), name, arrow, shown(row["value"]), interval, baseline, str(row["videos"])))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def label_of(row: dict[str, Any]) -> str:
    """Label of a row: its model, and the guidance scale if there is one."""
    return row["model"] if row["guidance"] is None else f"{row['model']}, guidance {row['guidance']:g}"


def shown(value: float) -> str:
    """Format a value with three digits or more: 0.000123, 0.984, 12.3, 1234."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"


# ------------------------------------------------------------------------------------------------------- the command


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    reports: Sequence[Path] = setting(
        help="report.json files of `megadit evaluate`, or their folders", positional=True, metavar="REPORT"
    )


@command(
    CompareOptions,
    prog="megadit evaluate compare",
    description="Compares the metrics of several evaluations; metrics of different protocols are refused.",
)
def main(options: CompareOptions) -> None:
    """Runs `megadit evaluate compare`; returns its exit code."""
    print(table(side_by_side([read_report(path) for path in options.reports])))
