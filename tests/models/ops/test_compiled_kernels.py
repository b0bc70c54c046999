"""Our Triton kernels, compiled to machine code for Hopper and Blackwell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

CAPABILITIES = (90, 100, 120)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Kernel -> what compile_kernels.py says of it."""
    folder = tmp_path_factory.mktemp("kernels")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, Path(__file__).with_name("compile_kernels.py")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["_norm_backward", "_gate_backward", "_sum_runs", "_cast"])
def test_a_kernel_keeps_in_registers_what_it_computes_with(found, name):
    """Of 128, two programs of eight warps fit on a multiprocessor."""
    for capability in CAPABILITIES:
        of = found[f"{name} sm_{capability}"]
        assert 0 < of["REG"] <= 128 and of["STACK"] == of["LOCAL"] == 0, (capability, of)


def test_the_noise_fuses_nothing(found):
    """Every product and sum of the program is one of the machine code, which has more for quotients and roots."""
    for capability in CAPABILITIES:
        of = found[f"_normal sm_{capability}"]
        assert of["mul"] > 100 and of["DMUL"] >= of["mul"] and of["DADD"] >= of["add"] > 100, of
    compiled = [of for name, of in found.items() if name.startswith("_normal ")]
    assert len(compiled) == len(CAPABILITIES) + 1, "and of a single column, of which most is left out"
    for of in compiled:
        assert of["fma"] == 0 < of["mul"] and of["div.rn"] > 0, of
        assert 0 < of["REG"] <= 64 and of["STACK"] == of["LOCAL"] == 0, of
