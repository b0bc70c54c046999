"""Memory that a step frees serves the next one."""

import ctypes
import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from megadit.train.engine.threads import keep_freed_memory
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
PAGES_OF_A_TENSOR = 400_000 * 4 // 4096


def page_faults(**variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | variables
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_steps_cause_page_faults_only_once():
    assert page_faults() < PAGES_OF_A_TENSOR / 4
    # told to hand every tensor back, glibc does, and asks for its pages in every step
    assert page_faults(MALLOC_MMAP_THRESHOLD_="65536") > 20 * PAGES_OF_A_TENSOR
