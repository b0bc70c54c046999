"""The tests of `openvino_cases.py`, in a process of their own.

On CPUs with AMX a process that has computed under OpenVINO 2026.4 dies of SIGSEGV when a forked child ends, as those of
data loaders do, which other tests start.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("openvino_cases.py")
pytestmark = pytest.mark.skipif(find_spec("openvino") is None, reason="openvino is not installed (megadit[openvino])")


def run_cases(which, **environment):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, str(CASES)]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=CASES.parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_in_a_process_of_its_own(exported):
    run_cases("not slow", EXPORTED=str(exported.path))


@pytest.mark.slow
def test_other_precisions_in_a_process_of_its_own():
    run_cases("slow")
