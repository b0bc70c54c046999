"""What the suite costs: seconds of each folder at the end of a run, and a limit for each fast test.

Processor seconds are those of the process that tests and of all its descendants, alive or waited for: unlike seconds
of a clock they hardly depend on what else the machine does. What a fixture of a module or of the session costs is told
beside the tests, as which of them pays for it is chance. With `CI` in the environment, a test without the mark `slow`
that takes more than `LIMIT` processor seconds fails, as does one that makes such a fixture: but for tests that
`costs("why")` marks, and for the fixtures of `COSTLY`.
"""

import os
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT = 30.0
"""About ten on an idle machine: neighbours in its caches cost up to twice as much again."""
COSTLY = {
    "rank_servers": "two processes import torch and Megatron, for the ranks of all tests",
    "exported": "three networks are exported once, for the tests of export/",
}
"""Fixture of the session -> why it may take longer."""
NUM_TOLD = 10
TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds() -> float:
    """Of this process and its descendants, user and system; of a descendant, in hundredths."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + _alive(os.getpid())


def _alive(pid: int) -> float:
    """Seconds of descendants that nobody has waited for (Linux; elsewhere 0)."""
    total = 0.0
    for child in _children(pid):
        try:
            fields = Path(f"/proc/{child}/stat").read_bytes().rpartition(b") ")[2].split()
        except OSError:  # ended a moment ago
            continue
        total += sum(map(int, fields[11:15])) / TICKS + _alive(child)
    return total


def _children(pid: int) -> list[int]:
    found = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
    except OSError:
        pass
    return found


class Meter:
    """Measures tests where they run: sets `budget` of every report to (seconds, processor seconds, of fixtures)."""

    def __init__(self) -> None:
        self._before, self._of_fixtures = (time.monotonic(), processor_seconds()), 0.0
        self._fixtures: list[tuple[str, float]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._lap()
        item.stash[SPENT] = 0.0
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        start, inner = processor_seconds(), self._of_fixtures
        try:
            return (yield)
        finally:  # a fixture that asks for others by `getfixturevalue` does not pay for them
            own = max(0.0, processor_seconds() - start - (self._of_fixtures - inner))
            self._of_fixtures += own
            self._fixtures.append((f"{fixturedef.baseid}::{fixturedef.argname}", own))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        seconds, processor = self._lap()
        fixtures, self._of_fixtures = self._of_fixtures, 0.0
        made, self._fixtures = self._fixtures, []
        item.stash[SPENT] += processor - fixtures
        report.budget = {"seconds": seconds, "processor": processor - fixtures, "fixtures": made}
        most = max([item.stash[SPENT], *(own for name, own in made if name.rpartition("::")[2] not in COSTLY)])
        if most > LIMIT and report.passed and report.when != "call" and "CI" in os.environ and _is_limited(item):
            report.outcome = "failed"
            report.longrepr = f"{most:.1f} processor seconds; a fast test, or a fixture, may take {LIMIT:g}"
        return report

    def _lap(self) -> tuple[float, float]:
        now = time.monotonic(), processor_seconds()
        # less than before where a process that nobody waits for has ended
        spent = now[0] - self._before[0], max(0.0, now[1] - self._before[1])
        self._before = now
        return spent


SPENT = pytest.StashKey[float]()


def _is_limited(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(name) for name in ("slow", "gpu", "costs"))


class Table:
    """Adds the reports up, where they arrive: with workers, in the process that started them."""

    def __init__(self) -> None:
        self._folders: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
        self._tests: dict[str, float] = defaultdict(float)
        self._fixtures: dict[str, list[float]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "budget"):
            return
        folder = self._folders[str(Path(report.nodeid.partition("::")[0]).parent)]
        folder[0] += report.when == "call"
        folder[1] += report.budget["seconds"]
        folder[2] += report.budget["processor"]
        self._tests[report.nodeid] += report.budget["processor"]
        for name, seconds in report.budget["fixtures"]:
            folder[3] += seconds
            self._fixtures[name].append(seconds)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._folders:
            return
        write = terminalreporter.write_line
        terminalreporter.section("budget")
        write(f"{'folder':<34} {'tests':>6} {'clock s':>8} {'processor s':>12} {'+ fixtures':>11}")
        whole = [sum(column) for column in zip(*self._folders.values(), strict=True)]
        for folder, (tests, *seconds) in [*sorted(self._folders.items()), ("all", whole)]:
            write("{:<34} {:>6} {:>8.1f} {:>12.1f} {:>11.1f}".format(folder, tests, *seconds))
        write(f"the {NUM_TOLD} costliest tests, and fixtures (how often made), in processor seconds:")
        for name, seconds in sorted(self._tests.items(), key=lambda one: -one[1])[:NUM_TOLD]:
            write(f"{seconds:8.1f} {name}")
        for name, made in sorted(self._fixtures.items(), key=lambda one: -sum(one[1]))[:NUM_TOLD]:
            write(f"{sum(made):8.1f} {name} ({len(made)})")
