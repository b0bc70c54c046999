"""Cores: those of the affinity, or of the control groups around a process; threads as the user says. Memory is written
as people write it, and a plan far beyond it is refused."""

import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megadit.models.shared import resources
from megadit.models.shared.errors import UserError
from megadit.models.shared.resources import GIB, TOO_MUCH, check_memory_fits, memory_in_words

UNITS = {"MiB": GIB / 1024, "GiB": GIB}
GROUPS = {
    "none": ("0::/\n", {}, 8),
    "no limit": ("0::/app\n", {"app/cpu.max": "max 100000"}, 8),
    "a quota": ("0::/app\n", {"app/cpu.max": "200000 100000"}, 2),
    "of a folder above": ("0::/app/own\n", {"app/cpu.max": "300000 100000", "app/own/cpu.max": "max 100000"}, 3),
    "the least": ("0::/app/own\n", {"app/cpu.max": "100000 100000", "app/own/cpu.max": "400000 100000"}, 1),
    "a container's root": ("0::/\n", {"cpu.max": "400000 100000"}, 4),
    "a half": ("0::/\n", {"cpu.max": "50000 100000"}, 1),
    "two and a half": ("0::/\n", {"cpu.max": "250000 100000"}, 2),
    "more than there are": ("0::/\n", {"cpu.max": "6400000 100000"}, 8),
    "version 1": (
        "5:memory:/x\n4:cpu,cpuacct:/docker/abc\n",
        {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "300000", "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000"},
        3,
    ),
    "version 1, a container's": (
        "4:cpu,cpuacct:/docker/abc\n",
        {"cpu,cpuacct/cpu.cfs_quota_us": "150000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
        1,
    ),
    "version 1, no limit": (
        "4:cpu:/\n",
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        8,
    ),
    "unreadable": ("0::/\n", {"cpu.max": "many"}, 8),
}


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Eight cores, no control group, nothing asked for."""
    monkeypatch.setattr(resources, "_allowed_cores", lambda: 8)
    monkeypatch.setattr(resources, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(resources, "OWN_GROUPS", tmp_path / "own")
    for name in (resources.THREADS, resources.SHARED_OUT, "LOCAL_WORLD_SIZE", *resources.WAITING):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


def write_groups(folder, own, limits):
    (folder / "own").write_text(own)
    for name, text in limits.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")


@pytest.mark.parametrize("case", GROUPS)
def test_control_groups_limit_the_cores(tmp_path, case):
    own, limits, expected = GROUPS[case]
    write_groups(tmp_path, own, limits)
    assert resources.available_cores() == expected
    assert [resources.threads_of_a_rank(ranks) for ranks in (1, 2, 64)] == [expected, max(1, expected // 2), 1]


V2 = {"memory.current": "700", "memory.stat": "anon 100\ninactive_file 50"}
V1 = {"memory.usage_in_bytes": "700", "memory.stat": "cache 60\ninactive_file 1\ntotal_inactive_file 50"}
MEMORY = {
    "version 2": ("0::/a/b\n", "a/b", {**V2, "memory.max": "1000"}, 350),
    "version 2, around it": ("0::/a/b\n", "a", {**V2, "memory.max": "1000"}, 350),
    "version 2, a container's": ("0::/\n", "", {**V2, "memory.max": "1000"}, 350),
    "version 2, no limit": ("0::/a\n", "a", {**V2, "memory.max": "max"}, 5000),
    "version 2, exceeded": ("0::/a\n", "a", {**V2, "memory.max": "600"}, 0),
    "version 1": ("9:memory:/a\n0::/\n", "memory/a", {**V1, "memory.limit_in_bytes": "1000"}, 350),
    "version 1, a container's": ("9:memory:/docker/a\n", "memory", {**V1, "memory.limit_in_bytes": "1000"}, 350),
    "version 1, no limit": ("9:memory:/a\n", "memory/a", {**V1, "memory.limit_in_bytes": str(2**63 - 4096)}, 5000),
    "nothing told, version 2": (None, "", {**V2, "memory.max": "1000"}, 350),
    "nothing told, version 1": (None, "memory", {**V1, "memory.limit_in_bytes": "1000"}, 350),
}


@pytest.mark.parametrize("case", MEMORY)
def test_control_groups_limit_memory(monkeypatch, tmp_path, case):
    """Caches are given back."""
    own, group, files, expected = MEMORY[case]
    write_groups(tmp_path, own or "", {f"{group}/{name}".lstrip("/"): text for name, text in files.items()})
    if own is None:
        (tmp_path / "own").unlink()
    monkeypatch.setattr(resources, "_available_memory", lambda: 5000)
    assert resources.host_memory() == expected


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("3,2", 3), (" 5 ", 5), ("", 8), ("0", 8), ("many", 8)])
def test_the_users_threads_count(monkeypatch, said, threads):
    monkeypatch.setenv(resources.THREADS, said)
    assert resources.threads_of_a_rank() == threads
    assert (resources.rank_environment(2) == {}) == (threads != 8)


def test_ranks_share_the_cores_unless_the_user_says_otherwise(monkeypatch):
    environment = resources.rank_environment(2)
    assert environment == {resources.THREADS: "4", resources.SHARED_OUT: "4"}
    monkeypatch.setenv(resources.THREADS, "4")
    assert resources.asked_threads() == 4
    monkeypatch.setenv(resources.SHARED_OUT, "4")
    assert resources.asked_threads() is None, "that is ours"
    assert resources.rank_environment(4)[resources.THREADS] == "2"


def test_a_quota_limits_a_process_that_has_no_ranks(tmp_path):
    resources.prepare_threads()
    assert resources.THREADS not in os.environ
    write_groups(tmp_path, *GROUPS["a quota"][:2])
    resources.prepare_threads()
    assert os.environ[resources.THREADS] == "2" and resources.asked_threads() is None


@pytest.mark.parametrize(("before", "after"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_of_a_command_wait_passively_unless_the_user_says_otherwise(before, after):
    program = (
        "import os, sys\n"
        "from megadit.models.shared.cli.command import run_command\n"
        "assert run_command(lambda argv: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules), []) == 0\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in resources.WAITING} | before
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == [after, "False"]


@given(st.floats(1, 1e9))
def test_a_size_is_written_without_an_exponent_and_within_a_twentieth(num_bytes):
    num_bytes *= 1e6
    text = memory_in_words(num_bytes)
    value, unit = re.fullmatch(r"([\d,]+(?:\.\d+)?) (MiB|GiB)", text).groups()
    assert float(value.replace(",", "")) * UNITS[unit] == pytest.approx(num_bytes, rel=0.05), text


def test_sizes_in_words():
    sizes = {190: "190 GiB", 18.4: "18 GiB", 2.52: "2.5 GiB", 0.11: "0.11 GiB", 1 / 32: "32 MiB", 1024.0: "1,000 GiB"}
    assert {size: memory_in_words(size * GIB) for size in sizes} == sizes


@given(needed=st.floats(0, 1e15), free=st.floats(0, 1e15))
def test_a_plan_is_refused_where_it_is_far_too_large(needed, free):
    try:
        check_memory_fits(needed, free, "this", "make it smaller")
    except UserError as error:
        assert needed >= TOO_MUCH * free and "this needs about" in str(error) and "make it smaller" in str(error)
    else:
        assert needed < TOO_MUCH * free
