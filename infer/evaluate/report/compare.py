"""`megadit evaluate compare`: metrics of several evaluations in one table, if their protocols are the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megadit.infer.evaluate.report.report import read_report, side_by_side, table
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting


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
