"""The kernel of the noise: by Triton's interpreter the same bits, and compiled to machine code that rounds as often."""

import json
import os
import subprocess
import sys

import pytest
import torch

from megadit.models.diffusion import noise
from megadit.models.ops import fusion

pytest.importorskip("triton", reason="Triton is not installed")
from megadit.models.diffusion import noise_kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def kernels_run_here(monkeypatch):
    """On a CPU by Triton's interpreter (conftest.py)."""
    monkeypatch.setattr(fusion, "KERNELS_ON", {DEVICE})
    monkeypatch.setattr(fusion, "triton_works", lambda device: True)
    noise.kernel_is_exact.cache_clear()
    yield
    noise.kernel_is_exact.cache_clear()


def keys(rows):
    generator = torch.Generator().manual_seed(rows)
    drawn = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return drawn.to(DEVICE), torch.randint(0, 2**40, (rows,), generator=generator).to(DEVICE)


@pytest.mark.parametrize(("rows", "width", "stream"), [(0, 4, 0), (1, 1, 1), (700, 16, 0), (33, 7, 65539), (5, 64, 3)])
def test_bits_are_those_of_the_definition(rows, width, stream):
    key, position = keys(rows)
    found = noise_kernel.normal_by_kernel(key, position, width, stream)
    assert torch.equal(found, noise.normal_by_operations(key, position, width, stream=stream))


def test_every_row_has_its_stream():
    key, position = keys(9)
    stream = torch.tensor([0, 3, 65539] * 3, device=DEVICE)
    found = noise_kernel.normal_by_kernel(key, position, 7, stream)
    for row in range(9):
        here, of_row = slice(row, row + 1), stream[row].item()
        assert torch.equal(found[here], noise.normal_by_operations(key[here], position[here], 7, stream=of_row))
    assert torch.equal(found, noise.normal_by_operations(key, position, 7, stream=stream))


def test_it_is_used_where_kernels_run_and_left_where_it_is_not_exact(monkeypatch):
    key, position = keys(3)
    made = noise.normal_by_operations(key, position, 5, stream=0)
    monkeypatch.setattr(noise, "normal_by_operations", lambda *_, **__: pytest.fail("called"))
    monkeypatch.setattr(noise, "kernel_is_exact", lambda device: True)
    assert torch.equal(noise.normal(key, position, 5, stream=0), made)
    monkeypatch.undo()
    monkeypatch.setattr(fusion, "KERNELS_ON", {DEVICE})
    monkeypatch.setattr(fusion, "triton_works", lambda device: True)
    by_kernel = noise_kernel.normal_by_kernel
    monkeypatch.setattr(noise_kernel, "normal_by_kernel", lambda *given: by_kernel(*given).nextafter(torch.ones(())))
    with pytest.warns(UserWarning, match="not exact on this device"):
        assert torch.equal(noise.normal(key, position, 5, stream=0), made)


PROGRAM = """
import json, re, subprocess, triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megadit.models.diffusion.noise_kernel import BLOCKS, _normal

types = dict.fromkeys(("key_ptr", "position_ptr", "stream_ptr"), "*i64") | {"out_ptr": "*fp32"} | dict.fromkeys(
    ("num_rows", "width", "per_row"), "i32") | {"BLOCKS": "constexpr"}
tool, found = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", {}
for capability, sizes in (90, {}), (100, {}), (120, {}), (90, {"num_rows": 1, "width": 1, "per_row": 1}):
    constants = {"BLOCKS": BLOCKS, **sizes}  # Triton makes a constant of an argument that is 1
    source = ASTSource(_normal, types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    Path("kernel.cubin").write_bytes(made.asm["cubin"])
    told = subprocess.run([tool, "-sass", "-res-usage", "kernel.cubin"], capture_output=True, text=True).stdout
    found[f"{capability} {sizes}"] = {
        **{name: len(re.findall(name, told)) for name in ("DMUL", "DADD")},
        **{name: len(re.findall(rf"{name}[.rn]*[.]f64", made.asm["ptx"])) for name in ("mul", "add", "fma", "div.rn")},
        **{name: int(re.search(rf"{name}:([0-9]+)", told)[1]) for name in ("REG", "STACK", "LOCAL")},
    }
print(json.dumps(found))
"""


def test_it_compiles_to_code_that_fuses_nothing(tmp_path):
    """Every product and sum of the program is one of the machine code, which has more for quotients and roots."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for name, of in found.items():
        if name.endswith("{}"):  # of a single column most is left out
            assert of["mul"] > 100 and of["DMUL"] >= of["mul"] and of["DADD"] >= of["add"] > 100, of
        assert of["fma"] == 0 < of["mul"] and of["div.rn"] > 0, of
        assert 0 < of["REG"] <= 64 and of["STACK"] == of["LOCAL"] == 0, of
    assert len(found) == 4
