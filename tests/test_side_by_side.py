"""Comparisons: what a ratio is, and how it is told."""

import json
import runpy
from pathlib import Path

import pytest
from side_by_side import Comparison, compare, show

from megadit.models.shared.errors import UserError

BENCHMARKS = Path(__file__).parent / "benchmarks"


def test_the_ratio_is_that_of_neighbours():
    one = Comparison("x", [1.0, 10.0, 4.0], [2.0, 20.0, 4.0], limit=0.75)
    assert one.ratios == [0.5, 0.5, 1.0] and one.ratio == 0.5
    with pytest.raises(UserError, match="--rounds 0"):
        compare("x", lambda: None, lambda: None, 0)


def test_what_is_slower_than_allowed_is_marked(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    file = tmp_path / "figures.json"
    show("title", [Comparison("fast", [1.0], [2.0], 1.0), Comparison("slow", [3.0], [2.0], 1.0)], str(file))
    shown = capsys.readouterr().out
    assert shown.count("too slow") == 1
    assert [one["ratio"] for one in json.loads(file.read_text())["comparisons"]] == [0.5, 1.5]


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_finds_what_it_times(script):
    runpy.run_path(str(script))
