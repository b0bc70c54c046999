"""Whole training steps: steps.py NAME, a row of `RUNS`. Prints what a step takes beside the planner's budget of it.

A network that this GPU cannot hold is cut to the layers that it can; `steps.py NAME GPU` says what would be run on a
GPU of the planner's table.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rows import DEVICE, HAS_GPU, tell

from megadit.models.machine import free_memory
from megadit.train.config.load import resolve_config
from megadit.train.config.schema import RunConfig
from megadit.train.plan.budget import budget
from megadit.train.plan.hardware import Gpu, find_gpu, this_device
from megadit.train.plan.layout import Layout
from megadit.train.plan.memory import RESERVE, needed_memory

MARGIN = 0.05
"""Share of the memory that stays free beside `RESERVE`: the plan is an estimate."""
ONE_PACK = ("data.mock=true", "data.global_batch_size=1", "data.micro_batch_size=1", "optimizer.optimizer=adamw",
            "ema.sigma_rels=[]", "optimizer.moments=bf16")  # fmt: skip
XL = ("pretrain_xl", *ONE_PACK, "data.seq_length=8192", "data.text_seq_length=512")
MIXED = "data.mock_latent_shapes=[[1,32,32],[4,32,32],[9,32,32]]"
RUNS = {
    "7b": ("performance_7b_8k_baseline", *ONE_PACK),
    "7b-fused": ("performance_7b_8k_baseline", *ONE_PACK, "parallel.gradient_accumulation_fusion=true"),
    "7b-eight-bits": ("performance_7b_8k_baseline", *ONE_PACK, "train.fp8=hybrid"),
    "7b-four": ("performance_7b_8k_baseline", *ONE_PACK, "data.global_batch_size=4"),
    "7b-graphs": ("performance_7b_8k_baseline", *ONE_PACK, "parallel.cuda_graph_max_segments=4"),
    "xl": (*XL, "data.mock_latent_shapes=[[32,32,32]]"),
    "xl-mixed": (*XL, MIXED),
    "xl-graphs": (*XL, MIXED, "parallel.cuda_graph_max_segments=16"),
    "tiny": ("digits_tiny", "data.mock=true"),
}


def that_fit(config: RunConfig, available: float) -> int:
    """The most layers with which a step of `config` fits into so many bytes; 0 where none do."""
    usable = available * (1 - RESERVE - MARGIN)
    layers = range(config.model.num_layers, 0, -1)
    return next((count for count in layers if needed_memory(with_layers(config, count), 1) <= usable), 0)


def with_layers(config: RunConfig, count: int) -> RunConfig:
    return replace(config, model=replace(config.model, num_layers=count))


def planned_seconds(config: RunConfig, gpu: Gpu) -> float:
    return sum(part.seconds for part in budget(config, Layout.of(config, 1), gpu))


def main(name: str, pretended: str | None = None) -> None:
    recipe, *overrides = RUNS[name]
    whole = resolve_config(recipe, overrides=overrides)
    gpu = find_gpu(pretended) if pretended else this_device(1)
    layers = that_fit(whole, gpu.memory if pretended else free_memory(DEVICE)) if HAS_GPU or pretended else None
    if layers == 0:
        tell(f"step, {name}", f"not measured: one layer needs {needed_memory(with_layers(whole, 1), 1) / 1e9:,.0f} GB")
        return
    config = with_layers(whole, layers or whole.model.num_layers)
    planned, of_whole = planned_seconds(config, gpu), planned_seconds(whole, gpu)
    cut = f"{config.model.num_layers} of {whole.model.num_layers} layers"
    if pretended:
        memory = needed_memory(config, 1) / 1e9
        tell(f"step, {name}", f"{cut}, {memory:,.0f} GB, planned {planned * 1e3:,.0f} ms", gb=memory)
        return
    overrides = [*overrides, f"model.num_layers={config.model.num_layers}"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        options = ["--recipe", recipe, *overrides, "--steps", "5" if HAS_GPU else "1", "--json", str(file)]
        done = subprocess.run([sys.executable, "-m", "megadit.train.benchmarks.train", *options], stdout=sys.stderr)
        if not file.is_file():
            tell(f"step, {name}", f"exit code {done.returncode}; its log says why", failed=True)
            return
        record = json.loads(file.read_text())
    figures = record["measurements"]
    needed, scaled = needed_memory(config, 1) / 1e9, figures["tokens_per_second"] * planned / of_whole
    tell(
        f"step, {name}",
        f"{cut}: {figures['seconds'] * 1e3:,.0f} ms (planned for {gpu.name}: {planned * 1e3:,.0f}), "
        f"{figures['tokens_per_second']:,.0f} tokens/s"
        + (f" ({scaled:,.0f} with all layers, by the plan)" if config != whole else "")
        + f", {figures['tflops']:.0f} TFLOP/s of {figures['matmul_tflops']:.0f}, "
        f"{figures['peak_memory_gb']:.1f} GB (planned: {needed:.1f})",
        planned_ms=planned * 1e3,
        planned_gb=needed,
        layers=config.model.num_layers,
        scaled_tokens_per_second=scaled,
        **{key: figures[key] for key in ("seconds", "tokens_per_second", "tflops", "matmul_tflops", "peak_memory_gb")},
    )
    for op, calls in record["ops"].items():
        tell(f"  {op}", ", ".join(f"{variant} {count} x" for variant, count in calls.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
