"""Prints losses, how many blocks each rank recomputes for several amounts of free memory, and how many activations it
copies to host memory.

recompute.py BYTES a.b=c ...    overrides of the recipe digits_tiny; BYTES are found on the first rank, more on others
"""

import json
import sys
from unittest import mock

import torch.distributed as dist

from megadit.models.megatron import cpu_shim

cpu_shim.install()

from megadit.models.megatron import groups as process_groups  # noqa: E402
from megadit.models.ops import ledger  # noqa: E402
from megadit.models.ops.offload import HostMemory  # noqa: E402
from megadit.train.config.load import resolve_config  # noqa: E402
from megadit.train.data.distribute import TrainBatches  # noqa: E402
from megadit.train.engine import building, setup  # noqa: E402
from megadit.train.engine.step import train_step  # noqa: E402


def run_config(granularity: str, overrides: list[str], offloaded: int = 0):
    choice = f"parallel.recompute_granularity={granularity}", f"parallel.cpu_offloading_num_layers={offloaded}"
    return resolve_config("digits_tiny", overrides=[*overrides, *choice])


def main(enough: float, overrides: list[str]) -> None:
    ledger.SMALL = 0
    cases = {
        "plenty": ("auto", 1e15, 0),
        "for two": ("auto", enough, 0),
        "nothing": ("auto", 0.0, 0),
        "offloaded": ("none", 0.0, 4),
        "two of each": ("auto", enough, 2),
    }
    groups = setup.start_processes(run_config("none", overrides))
    found = {}
    for name, (granularity, free, offloaded) in cases.items():
        run = run_config(granularity, overrides, offloaded)
        own = free * (1 + 9 * dist.get_rank())
        with mock.patch.object(building, "free_memory", lambda device, own=own: own):
            training = setup.build_training(run, groups)
        batches = TrainBatches(run, groups)
        with mock.patch.object(HostMemory, "_sent", autospec=True, side_effect=HostMemory._sent) as sent:
            losses = [train_step(training, batches, step).loss for step in (1, 2)]
        blocks = training.network.dit.blocks
        found[name] = {
            "recomputed": getattr(blocks, "num_recomputed", 0),
            "offloaded": sent.call_count,
            "losses": losses,
        }
    print(json.dumps(found), flush=True)
    process_groups.destroy()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
