"""`tests/machines.sh` makes this machine look like others, one after the other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import workers

SCRIPT = Path(__file__).with_name("machines.sh")
PROBE = """
import os

def test_probe():
    assert os.environ.get("ATEN_CPU_CAPABILITY") == "avx2"
"""


def machines(*arguments: str | Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHON": sys.executable, "WORKERS": "0"}
    return subprocess.run(["bash", SCRIPT, *arguments], env=environment, capture_output=True, text=True)


def test_names_are_listed_and_others_refused():
    names = machines("--list").stdout.split()
    assert {"native", "avx2", "one-core", "busy", "c-locale", "spaces", "non-root", "python3.13"} <= set(names)
    done = machines("avx2", "windows")
    assert done.returncode == 2 and done.stderr.startswith("windows is none of native avx2")


@pytest.mark.slow
def test_each_is_what_its_name_says_and_one_that_fails_ends_no_other(tmp_path):
    (tmp_path / "test_probe.py").write_text(PROBE)
    done = machines("c-locale", "avx2", "--", tmp_path / "test_probe.py", "-p", "no:cacheprovider")
    assert done.stdout.endswith("c-locale: failed\navx2: passed\n"), done.stdout + done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("marks", "expected"), [("", False), ("not slow", False), ("slow", False), ("not gpu", False), ("gpu", True)]
)
def test_a_gpu_is_used_by_the_tests_of_gpus_alone(marks, expected):
    assert workers.asks_for_gpus(marks) == expected
    assert workers.asks_for_gpus(f"({marks or 'slow'}) or (slow and gpu)")
