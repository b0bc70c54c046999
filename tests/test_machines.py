"""`tests/machines.sh` makes this machine look like others, one after the other."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import exports, workers

SCRIPT = Path(__file__).with_name("machines.sh")
PROBE = """
import os, socket

def test_probe():
    assert os.environ.get("ATEN_CPU_CAPABILITY") == "avx2"
    assert " " in os.getcwd() and len(os.sched_getaffinity(0)) == 1
    assert not [name for _, name in socket.if_nameindex() if name != "lo"]
"""


def machines(*arguments: str | Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHON": sys.executable, "WORKERS": "0"}
    return subprocess.run(["bash", SCRIPT, *arguments], env=environment, capture_output=True, text=True)


def test_names_are_listed_and_others_refused():
    names = machines("--list").stdout.split()
    assert {"native", "avx2", "one-core", "busy", "c-locale", "spaces", "non-root", "python3.13"} <= set(names)
    done = machines("avx2", "busy+windows")
    assert done.returncode == 2 and done.stderr.startswith("busy+windows is none of native avx2")
    all_of_them = re.search(r"^ALL=\((.*)\)$", SCRIPT.read_text(), re.MULTILINE)[1]
    assert sorted(re.split("[+ ]", all_of_them)) == sorted(names)


@pytest.mark.slow
def test_each_is_what_its_name_says_and_one_that_fails_ends_no_other(tmp_path):
    probe = tmp_path / "test_probe.py"
    probe.write_text(PROBE)
    several = "avx2+spaces+one-core+offline"
    done = machines("c-locale", several, "--", probe, "-p", "no:cacheprovider")
    assert done.stdout.endswith(f"c-locale: failed\n{several}: passed\n"), done.stdout + done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("marks", "expected"), [("", False), ("not slow", False), ("slow", False), ("not gpu", False), ("gpu", True)]
)
def test_a_gpu_is_used_by_the_tests_of_gpus_alone(marks, expected):
    assert workers.asks_for_gpus(marks) == expected
    assert workers.asks_for_gpus(f"({marks or 'slow'}) or (slow and gpu)")


def test_what_several_workers_ask_for_is_made_once(tmp_path):
    made = []

    def write(folder: Path) -> None:
        made.append(folder)
        time.sleep(0.1)  # the others open the lock meanwhile

    with ThreadPoolExecutor(3) as pool:
        folders = pool.map(lambda _: exports.fill_once(tmp_path, "x", write), range(3))
        assert set(folders) == set(made) and len(made) == 1
