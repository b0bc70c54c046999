"""Whole optimizer steps on the meta device, which stands for a GPU: prints what the host asked for, and sent.

Usage: whole_step.py OUT CASES; every rank runs it. CASES is {name: case}, see `layouts.py`; of `is_control`, the steps
ask and send in vain. Numbers are asked of a device that computes nothing, and collectives of its tensors move none.
"""

import json
import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from megadit.models.megatron import cpu_shim

META = torch.device("meta")
cpu_shim._CPU = META
cpu_shim.install()

sys.path.insert(0, str(Path(__file__).parents[2]))

from device_update import fuse  # noqa: E402
from layouts import run_config  # noqa: E402
from traffic import Traffic, ones  # noqa: E402

from megadit.models.megatron import groups as process_groups  # noqa: E402
from megadit.train.data.distribute import TrainBatches  # noqa: E402
from megadit.train.engine import setup  # noqa: E402
from megadit.train.engine.device_update import DeviceUpdate  # noqa: E402
from megadit.train.engine.setup import build_training, start_processes  # noqa: E402
from megadit.train.engine.step import train_step  # noqa: E402
from megadit.train.optim import optimizer  # noqa: E402

BAD_RANKS = 3
"""Where the sums of a step count the ranks whose losses are not finite; with any, the step would end otherwise."""
COLLECTIVES = (
    *("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "_all_gather_base"),
    *("reduce_scatter_tensor", "_reduce_scatter_base", "all_to_all_single"),
)


def answer(tensor):
    told = ones(tensor)
    if told.ndim == 1:
        told[BAD_RANKS : BAD_RANKS + 1] = 0
    return told


def moving_nothing(collective):
    """A collective, which does nothing to tensors of the meta device."""

    def done(*args, async_op=False, **kwargs):
        if any(isinstance(x, torch.Tensor) and x.is_meta for x in tree_leaves((args, kwargs))):
            return mock.Mock(wait=lambda: None) if async_op else None
        return collective(*args, **kwargs, **({"async_op": True} if async_op else {}))

    return done


def stand_in_for_collectives():
    """In place of those of torch, under every name by which others have them."""
    dist.batch_isend_irecv = lambda transfers: []
    for name in COLLECTIVES:
        collective, instead = getattr(dist, name), moving_nothing(getattr(dist, name))
        for module in [dist, *(module for key, module in sys.modules.items() if key.startswith("megatron."))]:
            for alias in [key for key, value in vars(module).items() if value is collective]:
                setattr(module, alias, instead)


def run(out, case) -> dict:
    case = dict(case)
    is_control = case.pop("is_control", False)
    case = {"precision": "bf16", "optimizer": {"moments": "bf16"}} | case
    case["data"] = {"global_batch_size": int(os.environ.get("WORLD_SIZE", 1))} | case.get("data", {})
    config = run_config(out, case)
    with Traffic(answer) as traffic:
        training = build_training(config, start_processes(config))
        batches = TrainBatches(config, training.groups)
        train_step(training, batches, 1)  # constants are sent in the first step
        traffic.forget()
        train_step(training, batches, 2)
        if is_control:
            next(training.parameters()).sum().item()
            torch.ones(3, device="cpu").to(META)
            torch.tensor([1.0], device=META)
    process_groups.release()
    updates = 1 if training.critic is None else 1 + config.train.distill.critic_updates
    told = {"updates": updates, "micro_batches": training.num_micro_batches}
    return told | {"asked": traffic.asked, "sent": traffic.sent}


def main(out, cases):
    stand_in_for_collectives()
    named = torch.Tensor.type
    torch.Tensor.type = lambda x, *to: named(x, *to) if to else named(x).replace("meta.", "")  # Megatron knows few
    process_groups._local_device = lambda: META
    start = process_groups._start_torch_distributed
    process_groups._start_torch_distributed = lambda device: start(torch.device("cpu"))
    setup.device_update = lambda made, parts: DeviceUpdate(made)  # as on a GPU
    optimizer.fuse_updates = fuse
    sys.modules[torch.optim.Adam.__module__]._device_dtype_check_for_fused = lambda *args, **options: None
    print(json.dumps({name: run(out, case) for name, case in cases.items()}), flush=True)
    process_groups.destroy()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
