"""Tests that compute under OpenVINO (`openvino_cases.py`, `benchmark_cpu_cases.py`), in processes of their own.

A process that has computed under OpenVINO 2026.4 dies of SIGSEGV when a forked child ends, as those of data loaders do,
which other tests start.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(find_spec("openvino") is None, reason="openvino is not installed (megadit[openvino])"),
    pytest.mark.skipif(
        os.environ.get("ONEDNN_MAX_CPU_ISA") == "SSE41",
        reason="OpenVINO's own kernels ask the processor, oneDNN's this",
    ),
]


def run_cases(which, *files, **environment):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which]
    command += [str(FOLDER / file) for file in files]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=FOLDER.parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_in_a_process_of_its_own(exported):
    run_cases("not slow", "openvino_cases.py", EXPORTED=str(exported.path))


@pytest.mark.slow
def test_slow_ones_in_a_process_of_their_own():
    run_cases("slow", "benchmark_cpu_cases.py", "openvino_cases.py")
