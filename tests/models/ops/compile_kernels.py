"""Run as a process: compiles our Triton kernels for GPUs, which needs none, and prints what machine code they became.

{"kernel sm_90": {"REG", "STACK", "LOCAL"} and, of the noise, how many instructions of each kind}; for the width of 7B.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megadit.models.diffusion import noise_kernel
from megadit.models.ops import cast_transpose, row_sums

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
POINTERS = {"scale_ptr": "*fp32", "plain_ptr": "*fp8e4nv", "turned_ptr": "*fp8e4nv", "mean_ptr": "*fp32",
            "root_inverse_ptr": "*fp32", "sums_ptr": "*fp32", "row_ptr": "*i64", "row_of_run_ptr": "*i64",
            "starts_ptr": "*i32", "key_ptr": "*i64", "position_ptr": "*i64", "stream_ptr": "*i64"}  # fmt: skip
MULTIPLES_OF_16 = ("width", "gate_stride", "gain_stride", "num_rows", "num_columns")
CAPABILITIES = (90, 100, 120)
BY_ROWS = {
    row_sums._norm_backward: {"IS_RMS": False, "BLOCK": 4096},
    row_sums._gate_backward: {"BLOCK": 1024},
    row_sums._sum_runs: {"RUNS": 16, "BLOCK": 1024},
    cast_transpose._cast: {"BOTH": True, "CODE": tl.float8e4nv, "ROWS": 128, "COLUMNS": 64},
}
NOISE = {"BLOCKS": noise_kernel.BLOCKS}
ONES = dict.fromkeys(("num_rows", "width", "per_row"), 1)
"""Triton makes a constant of an argument that is 1."""


def compiled(kernel, constants, capability, *, aligned=(), out="*bf16", asked=(), **options):
    """(PTX, what cuobjdump tells of the machine code)."""
    types = {n: POINTERS.get(n, "*bf16" if n.endswith("_ptr") else "i32") for n in kernel.arg_names}
    types |= {"out_ptr": out} if "out_ptr" in types else {}
    attributes = {(list(types).index(name),): [["tt.divisibility", 16]] for name in aligned}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        told = subprocess.run([TOOL, *asked, "-res-usage", file.name], capture_output=True, text=True).stdout
    return made.asm["ptx"], told


def usage(told):
    return {name: int(re.search(rf"{name}:([0-9]+)", told)[1]) for name in ("REG", "STACK", "LOCAL")}


def by_rows(kernel, constants, capability):
    aligned = [name for name in kernel.arg_names if name.endswith("_ptr") or name in MULTIPLES_OF_16]
    num_warps = row_sums.num_warps(4096) if kernel is row_sums._norm_backward else 4
    return usage(compiled(kernel, constants, capability, aligned=aligned, num_warps=num_warps)[1])


def noise(constants, capability):
    options = {"num_warps": 4, "enable_fp_fusion": False}
    ptx, told = compiled(noise_kernel._normal, constants, capability, out="*fp32", asked=["-sass"], **options)
    return {
        **usage(told),
        **{name: len(re.findall(name, told)) for name in ("DMUL", "DADD")},
        **{name: len(re.findall(rf"{name}[.rn]*[.]f64", ptx)) for name in ("mul", "add", "fma", "div.rn")},
    }


if __name__ == "__main__":
    found = {}
    for capability in CAPABILITIES:
        for kernel, constants in BY_ROWS.items():
            found[f"{kernel.__name__} sm_{capability}"] = by_rows(kernel, constants, capability)
        found[f"_normal sm_{capability}"] = noise(NOISE, capability)
    found["_normal of one number"] = noise(NOISE | ONES, CAPABILITIES[0])
    print(json.dumps(found))
