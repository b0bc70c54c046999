"""Memory that a step frees serves the next one."""

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from megadit.train.cpu_memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    activations = [torch.ones(400_000) for _ in range(4)]

for _ in range(5):
    step()
before = faults()
for _ in range(20):
    step()
print(faults() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_steps_cause_page_faults_only_once():
    freed, kept = (
        int(subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True).stdout)
        for how in ("freed", "kept")
    )
    pages_of_a_tensor = 400_000 * 4 / 4096
    assert kept < pages_of_a_tensor / 10
    assert freed > 20 * pages_of_a_tensor, "left alone, it asks for the pages in every step"
