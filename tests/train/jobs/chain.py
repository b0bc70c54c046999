"""Runs of a small network, one after another, each under a layout of its own; every rank runs it.

Usage: chain.py OUT; OUT/runs.json is a list of {"folder", "iters", "case"}: a run in OUT/folder, continued from what
is there.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megadit.models.megatron import cpu_shim

if __name__ == "__main__":
    cpu_shim.install()

import megatron.core  # noqa: E402
from layouts import in_two_turns, randomise_initial_values, run_config  # noqa: E402

from megadit.models.megatron import groups as process_groups  # noqa: E402
from megadit.train.engine.loop import train  # noqa: E402


def run(out, folder, iters, case):
    config = in_two_turns(run_config(out / folder, case))
    train(
        replace(
            config,
            train=replace(config.train, train_iters=iters),
            # rates must not depend on where a run is to end
            optimizer=replace(config.optimizer, lr_warmup_iters=0, lr_decay_style="constant"),
            checkpoint=replace(config.checkpoint, save_interval=1000),
            validation=replace(config.validation, interval=0),
            logger=replace(config.logger, tensorboard=False),
        )
    )


def main():
    out = Path(sys.argv[1])
    randomise_initial_values()
    destroy = process_groups.destroy
    process_groups.destroy = process_groups.release  # the ranks stay together
    for settings in json.loads((out / "runs.json").read_text()):
        run(out, **settings)
        dist.barrier()
    print(f"Megatron-core {megatron.core.__version__}")
    destroy()


if __name__ == "__main__":
    main()
