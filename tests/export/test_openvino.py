"""The tests of `openvino_cases.py`, in a process of their own.

On CPUs with AMX a process that has computed under OpenVINO 2026.4 dies of SIGSEGV when a forked child ends, as those of
data loaders do, which other tests start.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("openvino_cases.py")


@pytest.mark.skipif(find_spec("openvino") is None, reason="openvino is not installed (megadit[openvino])")
@pytest.mark.parametrize("which", [pytest.param("slow", marks=pytest.mark.slow), "not slow"])
@pytest.mark.costs("exports three networks once more, for a process of its own")
def test_in_a_process_of_its_own(which):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, str(CASES)]
    done = subprocess.run(command, cwd=CASES.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
