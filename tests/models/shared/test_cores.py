"""Cores: those of the affinity, or of the control groups around a process; threads as the user says."""

import os
import subprocess
import sys

import pytest

from megadit.models.shared import cores

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
    monkeypatch.setattr(cores, "_allowed_cores", lambda: 8)
    monkeypatch.setattr(cores, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(cores, "OWN_GROUPS", tmp_path / "own")
    for name in (cores.THREADS, cores.SHARED_OUT, "LOCAL_WORLD_SIZE", *cores.WAITING):
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
    assert cores.available_cores() == expected
    assert [cores.threads_of_a_rank(ranks) for ranks in (1, 2, 64)] == [expected, max(1, expected // 2), 1]


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("3,2", 3), (" 5 ", 5), ("", 8), ("0", 8), ("many", 8)])
def test_the_users_threads_count(monkeypatch, said, threads):
    monkeypatch.setenv(cores.THREADS, said)
    assert cores.threads_of_a_rank() == threads
    assert (cores.rank_environment(2) == {}) == (threads != 8)


def test_ranks_share_the_cores_unless_the_user_says_otherwise(monkeypatch):
    environment = cores.rank_environment(2)
    assert environment == {cores.THREADS: "4", cores.SHARED_OUT: "4"}
    monkeypatch.setenv(cores.THREADS, "4")
    assert cores.asked_threads() == 4
    monkeypatch.setenv(cores.SHARED_OUT, "4")
    assert cores.asked_threads() is None, "that is ours"
    assert cores.rank_environment(4)[cores.THREADS] == "2"


def test_a_quota_limits_a_process_that_has_no_ranks(tmp_path):
    cores.prepare_threads()
    assert cores.THREADS not in os.environ
    write_groups(tmp_path, *GROUPS["a quota"][:2])
    cores.prepare_threads()
    assert os.environ[cores.THREADS] == "2" and cores.asked_threads() is None


@pytest.mark.parametrize(("before", "after"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_of_a_command_wait_passively_unless_the_user_says_otherwise(before, after):
    program = (
        "import os, sys\n"
        "from megadit.models.shared.cli.command import run_command\n"
        "assert run_command(lambda argv: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules), []) == 0\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in cores.WAITING} | before
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == [after, "False"]
