"""Which tests one worker of pytest-xdist runs, in which order, and with how many threads.

A file stays with one worker, so that no fixture of a module is made twice. Files whose tests ask for the same costly
fixture of the session form a group, which stays with one worker too. Groups start in the order of `FIRST`: what takes
long must not come last.
"""

import os
from collections import defaultdict
from pathlib import Path

import pytest

GROUP_OF_FIXTURE = {
    "tritonserver": "triton",
    "exported": "export",
}
"""Fixture of the session -> the group of the files that use it."""
FIRST = ("triton", "export")
"""Groups and files that start before others, in this order."""


class Workers:
    """Puts tests in groups, and each worker's threads on its part of the processor's cores."""

    def pytest_configure(self, config: pytest.Config) -> None:
        if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # before anything imports torch
            threads = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))

    @pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for marks
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if "PYTEST_XDIST_WORKER_COUNT" not in os.environ:
            return
        names = _names_of_groups(items)
        for item in items:
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(names[item.path]))
        ranks = {name: place for place, name in enumerate(FIRST)}
        items.sort(key=lambda item: ranks.get(names[item.path], len(FIRST)))


def _names_of_groups(items: list[pytest.Item]) -> dict[Path, str]:
    """File -> the group of its tests: named by a mark, by a fixture that one of them asks for, or like the file."""
    fixtures: dict[Path, set[str]] = defaultdict(set)
    marked: dict[Path, str] = {}
    for item in items:
        fixtures[item.path].update(item.fixturenames)
        if mark := item.get_closest_marker("xdist_group"):
            marked[item.path] = mark.args[0]
    root = Path(__file__).parent
    return {
        path: marked.get(path)
        or next((group for name, group in GROUP_OF_FIXTURE.items() if name in asked), None)
        or path.relative_to(root).with_suffix("").as_posix()
        for path, asked in fixtures.items()
    }
