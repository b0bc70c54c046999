"""Prints, as JSON, what one rank of each small run holds: bytes of its tensors, and the process's peak over a step.

Usage: memory.py RUNS, {name: overrides of the recipe digits_tiny}; each runs in a process forked from this one.
"""

import ctypes
import gc
import json
import os
import sys
from collections import Counter
from pathlib import Path

from megadit.models.megatron import cpu_shim

cpu_shim.install()

from megadit.train.config.load import resolve_config  # noqa: E402
from megadit.train.data.distribute import TrainBatches  # noqa: E402
from megadit.train.engine.setup import build_training, start_processes  # noqa: E402
from megadit.train.engine.step import train_step  # noqa: E402


def resident(kind: str) -> int:
    """Bytes, but for pages of files, which calls of code read; VmRSS is now, VmHWM the most since `settle`."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * (int(lines[kind].split()[0]) - int(lines["RssFile"].split()[0]))


def settle() -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def tensor_bytes(training) -> dict[str, int]:
    buffers = [buffer for part in training.parts for buffer in part.buffers + part.expert_parallel_buffers]
    states = [
        value
        for part in training.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for value in state.values()
    ]
    masters = {owned.master.untyped_storage().data_ptr(): owned.master for owned in training.tensors.ownership.slices}
    weights = {p.untyped_storage().data_ptr() for p in training.parameters()}
    return {
        "gradients": sum(buffer.grad_data.numel() * buffer.grad_data.element_size() for buffer in buffers),
        "optimizer": sum(value.numel() * value.element_size() for value in states if value.ndim)
        + sum(m.numel() * m.element_size() for place, m in masters.items() if place not in weights),
        "ema_weights": sum(
            value.numel() * value.element_size()
            for sigma_rel in training.ema_weights.sigma_rels
            for value in training.ema_weights._ema_weights[sigma_rel]
        ),
    }


def measure(overrides: list[str]) -> dict[str, int]:
    config = resolve_config("digits_tiny", overrides=["data.mock=true", *overrides])
    groups = start_processes(config)
    batches = TrainBatches(config, groups)
    before = settle()
    training = build_training(config, groups)
    train_step(training, batches, 1, must_stop=False)  # the optimizer's state appears
    settled = settle()
    train_step(training, batches, 2, must_stop=False)
    held = Counter(dict.fromkeys(("gradients", "optimizer", "ema_weights"), 0))
    for trained in training.all_trained:
        held.update(tensor_bytes(trained))
    networks = [part.module for trained in training.all_trained for part in trained.parts]
    networks += [] if training.teacher is None else [training.teacher.network]
    tensors = {id(p): p for network in networks for p in network.parameters()}  # one of several networks counts once
    held["parameters"] = sum(p.numel() * p.element_size() for p in tensors.values())
    return {**held, "resting": settled - before, "peak": resident("VmHWM") - before}


def main(runs: dict[str, list[str]]) -> None:
    for name, overrides in runs.items():
        if pid := os.fork():
            assert os.waitpid(pid, 0)[1] == 0, name
        else:
            print(json.dumps({name: measure(overrides)}), flush=True)
            os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
