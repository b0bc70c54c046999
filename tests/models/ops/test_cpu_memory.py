"""Memory that a step frees serves the next one."""

import ctypes
import json
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, json, os, resource
from megadit.models.ops.crossover import keep_freed_memory

M_MMAP_THRESHOLD = -3

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    activations = [bytearray(b"1") * 1_600_000 for _ in range(4)]

def faults_of_steps():
    for _ in range(5):
        step()
    before = faults()
    for _ in range(20):
        step()
    return faults() - before

# told to hand all memory back, glibc does, and asks for its pages in every step
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
os.environ["MALLOC_ARENA_MAX"] = "1"
keep_freed_memory()
as_told = faults_of_steps()
del os.environ["MALLOC_ARENA_MAX"]
keep_freed_memory()
print(json.dumps([as_told, faults_of_steps()]))
"""
PAGES_OF_A_TENSOR = 1_600_000 // 4096


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_steps_cause_page_faults_only_once_unless_the_environment_says_otherwise():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    as_told, kept = json.loads(done.stdout)
    assert kept < PAGES_OF_A_TENSOR / 4
    assert as_told > 20 * PAGES_OF_A_TENSOR
