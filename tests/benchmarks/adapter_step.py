"""One optimizer step of an adapter beside one of its network, each pair in one run, as a ratio.

    python tests/benchmarks/adapter_step.py [--rounds 9] [--threads 1] [--json FILE]

8 blocks 512 wide, one pack of 1,024 tokens, float32, AdamW; the adapter has rank 16 beside attention and MLP. The
longer the samples, the more of a step is attention, whose backward stays whole.
"""

import itertools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace

import torch
from side_by_side import compare, show

from megadit.infer.benchmarks.beside_diffusers import BenchmarkOptions
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.flops import training_flops
from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options
from megadit.train.config.schema import RunConfig
from megadit.train.recipes import load_recipe

CASES = {"4 samples of 256 tokens": ((1, 32, 32), 0.75), "1 sample of 1,024 tokens": ((1, 64, 64), 0.85)}
"""What fills the pack -> the latent shape of its samples, and the ratio that ought not to be exceeded."""


def network_run(folder: str, shape: tuple[int, int, int]) -> RunConfig:
    run = load_recipe("digits_tiny")
    sizes = {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "patch_spatial": 2}
    data = {"mock": True, "mock_latent_shapes": (shape,), "seq_length": 1024, "text_seq_length": 128}
    return replace(
        run,
        model=replace(run.model, **sizes),
        data=replace(run.data, **data, global_batch_size=1, num_workers=0),
        train=replace(run.train, output_dir=folder, num_threads=torch.get_num_threads()),
        optimizer=replace(run.optimizer, optimizer="adamw"),
        ema=replace(run.ema, sigma_rels=(0.1,)),
    )


def _steps(config: RunConfig, groups) -> Callable[[], object]:
    from megadit.train.data.distribute import TrainBatches
    from megadit.train.engine.setup import build_training
    from megadit.train.engine.step import train_step

    training, batches, steps = build_training(config, groups), TrainBatches(config, groups), itertools.count(1)
    return lambda: train_step(training, batches, next(steps))


def _run(argv: list[str]) -> None:
    options = read_options(
        BenchmarkOptions,
        argv,
        prog="python tests/benchmarks/adapter_step.py",
        description="Times training of an adapter beside that of its network.",
    )
    options.set_threads()
    if not torch.cuda.is_available():
        from megadit.models.megatron import cpu_shim

        cpu_shim.install()  # before anything imports Megatron
    from megadit.models.megatron import groups as process_groups
    from megadit.train.engine.setup import start_processes
    from megadit.train.plan.work import typical_pack

    found = []
    for name, (shape, limit) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            whole = network_run(folder, shape)
            adapted = replace(whole, train=replace(whole.train, adapter=AdapterConfig(rank=16)))
            groups, pack = start_processes(whole), typical_pack(whole)
            share = training_flops(pack, whole.model, adapted.train.adapter) / training_flops(pack, whole.model)
            steps = _steps(adapted, groups), _steps(whole, groups)
            found.append(compare(f"{name} ({share:.2f} of the operations)", *steps, options.rounds, limit=limit))
            process_groups.release()
    show("one step: of an adapter / of its network", found, options.json)


def main(argv: list[str]) -> int:
    return run_command(_run, argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
