"""Prints, as JSON, how much the process of each rank grows: while the network is built, between steps, and in a step.

Usage: peak_memory.py a.b=c ..., overrides of the recipe digits_tiny; every rank runs it.
"""

import json
import sys

from memory import resident, settle  # first: it installs the shim

from megadit.models.megatron import groups as process_groups
from megadit.train.batches import TrainBatches
from megadit.train.overrides import resolve_config
from megadit.train.setup import build_training, start_processes
from megadit.train.step import train_step


def main(overrides: list[str]) -> None:
    config = resolve_config("digits_tiny", overrides=["data.mock=true", *overrides])
    groups = start_processes(config)
    batches = TrainBatches(config, groups)
    before = settle()
    training = build_training(config, groups)
    found = {"building": resident("VmHWM") - before}
    train_step(training, batches, 1)  # the optimizer's state appears
    found["resting"] = settle() - before
    train_step(training, batches, 2)
    found["peak"] = resident("VmHWM") - before
    found["whole"] = 4 * sum(parameter.numel() for parameter in training.parameters())
    found["block"] = 4 * sum(parameter.numel() for parameter in training.network.dit.blocks["0"].parameters())
    print(json.dumps(found))
    process_groups.destroy()


if __name__ == "__main__":
    main(sys.argv[1:])
