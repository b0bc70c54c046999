"""Whole training steps: steps.py NAME, a row of `RUNS`. Prints what a step takes beside the planner's budget of it."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rows import HAS_GPU, tell

from megadit.train.config.load import resolve_config
from megadit.train.plan.budget import budget
from megadit.train.plan.hardware import find_gpu
from megadit.train.plan.layout import Layout

ONE_PACK = ("data.mock=true", "data.global_batch_size=1", "data.micro_batch_size=1", "optimizer.optimizer=adamw",
            "ema.sigma_rels=[]", "optimizer.moments=bf16")  # fmt: skip
XL = ("pretrain_xl", *ONE_PACK, "data.seq_length=8192", "data.text_seq_length=512")
MIXED = "data.mock_latent_shapes=[[1,32,32],[4,32,32],[9,32,32]]"
RUNS = {
    "7b": ("performance_7b_8k_baseline", *ONE_PACK),
    "7b-fused": ("performance_7b_8k_baseline", *ONE_PACK, "parallel.gradient_accumulation_fusion=true"),
    "7b-eight-bits": ("performance_7b_8k_baseline", *ONE_PACK, "train.fp8=hybrid"),
    "7b-four": ("performance_7b_8k_baseline", *ONE_PACK, "data.global_batch_size=4"),
    "xl": (*XL, "data.mock_latent_shapes=[[32,32,32]]"),
    "xl-mixed": (*XL, MIXED),
    "xl-graphs": (*XL, MIXED, "parallel.cuda_graph_max_segments=16"),
    "tiny": ("digits_tiny", "data.mock=true"),
}


def main(name: str) -> None:
    recipe, *overrides = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        options = ["--recipe", recipe, *overrides, "--steps", "5" if HAS_GPU else "1", "--json", str(file)]
        done = subprocess.run([sys.executable, "-m", "megadit.train.benchmarks.train", *options], stdout=sys.stderr)
        if not file.is_file():
            tell(f"step, {name}", f"exit code {done.returncode}; its log says why", failed=True)
            return
        record = json.loads(file.read_text())
    config, figures = resolve_config(recipe, overrides=overrides), record["figures"]
    planned = sum(part.seconds for part in budget(config, Layout.of(config, 1), find_gpu("h200-141gb")))
    tell(
        f"step, {name}",
        f"{figures['seconds'] * 1e3:,.0f} ms (planned for an H200: {planned * 1e3:,.0f}), "
        f"{figures['tokens_per_second']:,.0f} tokens/s, {figures['tflops']:.0f} TFLOP/s of "
        f"{figures['matmul_tflops']:.0f}, {figures['peak_memory_gb']:.0f} GB",
        planned_ms=planned * 1e3,
        **{key: figures[key] for key in ("seconds", "tokens_per_second", "tflops", "matmul_tflops", "peak_memory_gb")},
    )
    for op, calls in record["ops"].items():
        tell(f"  {op}", ", ".join(f"{variant} {count} x" for variant, count in calls.items()))


if __name__ == "__main__":
    main(sys.argv[1])
