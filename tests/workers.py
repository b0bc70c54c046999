"""Which tests one worker of pytest-xdist runs, in which order, and with how many threads.

A file stays with one worker, so that no fixture of a module is made twice; its slow tests apart, which are not run with
the others. Files whose tests ask for the same costly fixture of the session form a group, which stays with one worker
too, except that slow tests fork ranks from processes of either worker. Groups start in the order of `FIRST`: what takes
long must not come last.

The workers find the groups, as only they collect tests, and leave them in a file for the process that deals them out.
(`--dist loadgroup` would, but pytest 9.2 does not show it the names that it gives to tests.)
"""

import json
import os
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

from megadit.models.shared.resources import available_cores, prepare_threads

GROUP_OF_FIXTURE = {
    "tritonserver": "triton",
    "exported": "export",
    "rank_servers": "ranks",
    "quick_demo": "demo",
}
"""Fixture of the session -> the group of the files that use it."""
FIRST = (
    "triton",
    "ranks",
    "export",
    # fork readers: cheap as long as this process has imported little
    "train/data/test_redistribute",
    "train/data/test_loader",
    # slow tests of one file that take minutes each, the longest first
    "train/test_matching",
    "train/test_effects",
    "train/test_classification",
    "train/test_elastic",
    "train/test_whole_step",
    "train/test_newer_megatron",
)
"""Groups and files that start before others, in this order."""


def asks_for_gpus(marks: str) -> bool:
    """Whether tests of this expression of marks (pytest -m) are those of GPUs; all others run as without any."""
    return re.search(r"(?<!not )\bgpu\b", marks) is not None


class Dealer:
    """Of the process that starts the workers: deals groups out."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="megadit-tests-"))
        self._groups: dict[str, str] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node) -> None:
        node.workerinput["groups"] = str(self._folder / "groups.json")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log):
        from xdist.scheduler import LoadScopeScheduling

        class Groups(LoadScopeScheduling):
            _split_scope = staticmethod(self._group)

        config.option.loadscopereorder = False
        return Groups(config, log)

    def _group(self, nodeid: str) -> str:
        if not self._groups:
            self._groups = json.loads((self._folder / "groups.json").read_text())
        return self._groups[nodeid]

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._folder)


def take_a_share_of_the_cores() -> None:
    """A worker's part of them, whose threads sleep while they wait; before anything imports torch."""
    prepare_threads()
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // int(workers))))


class Bytecode:
    """Keeps test files as they were rewritten and compiled, also where the environment asks for no bytecode, as
    containers do: half of what collecting them takes, in each worker of each run. While tests run, it is as asked."""

    def __init__(self) -> None:
        self._asked, sys.dont_write_bytecode = sys.dont_write_bytecode, False

    def pytest_collection_finish(self) -> None:
        sys.dont_write_bytecode = self._asked


class Worker:
    """Of a worker: finds groups."""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        names = _names_of_groups(items)
        file = Path(config.workerinput["groups"])
        part = file.with_name(config.workerinput["workerid"])
        part.write_text(json.dumps({item.nodeid: names[_key(item)] for item in items}))
        part.replace(file)
        places = {name: place for place, name in enumerate(FIRST)}
        items.sort(key=lambda item: places.get(names[_key(item)], len(FIRST)))


Key = tuple[Path, bool]


def _key(item: pytest.Item) -> Key:
    """The file of a test, and whether it is one of its slow ones."""
    return item.path, item.get_closest_marker("slow") is not None


def _names_of_groups(items: list[pytest.Item]) -> dict[Key, str]:
    """The group of a file's tests: named by a mark, by a fixture that one of them asks for, or like the file."""
    fixtures: dict[Key, set[str]] = defaultdict(set)
    names: dict[Key, str] = {}
    for item in items:
        fixtures[_key(item)].update(item.fixturenames)
        if mark := item.get_closest_marker("group"):
            names[_key(item)] = mark.args[0]
    root = Path(__file__).parent
    for (path, is_slow), asked in fixtures.items():
        shared = [group for name, group in GROUP_OF_FIXTURE.items() if name in asked]
        if not shared or (is_slow and shared == ["ranks"]):
            shared = [path.relative_to(root).with_suffix("").as_posix()]
        names.setdefault((path, is_slow), shared[0])
    return names
