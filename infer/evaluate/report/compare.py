"""`megadit evaluate compare`: metrics of several evaluations in one table, if their protocols are the same."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megadit.infer.evaluate.report.report import read_report, side_by_side, table
from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    reports: Sequence[Path] = setting(
        help="report.json files of `megadit evaluate`, or their folders", positional=True, metavar="REPORT"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs `megadit evaluate compare`; returns its exit code."""
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def _run(argv: list[str]) -> None:
    description = "Compares the metrics of several evaluations; metrics of different protocols are refused."
    options = read_options(CompareOptions, argv, prog="megadit evaluate compare", description=description)
    print(table(side_by_side([read_report(path) for path in options.reports])))


if __name__ == "__main__":
    raise SystemExit(main())
