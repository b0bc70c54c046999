"""Whole optimizer steps on the meta device, which stands for a GPU: prints what the host asked for, and sent.

Usage: whole_step.py OUT CASES; one rank. CASES is {name: case}, see `layouts.py`. Whatever is asked of a device that
computes nothing is answered by ones, and counted with the line that asked. `control` asks and sends in vain.
"""

import json
import sys
import traceback
from collections import Counter
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megadit.models.megatron import cpu_shim

META = torch.device("meta")
cpu_shim._CPU = META
cpu_shim.install()

from layouts import run_config  # noqa: E402

from megadit.models.megatron import groups as process_groups  # noqa: E402
from megadit.train import setup  # noqa: E402
from megadit.train.data.distribute import TrainBatches  # noqa: E402
from megadit.train.device_update import DeviceUpdate  # noqa: E402
from megadit.train.setup import build_training, start_processes  # noqa: E402
from megadit.train.step import train_step  # noqa: E402

WARM, COUNTED = 1, 1
"""Steps: constants are sent in the first."""
BAD_RANKS = 3
"""Where the sums of a step count the ranks whose losses are not finite; with any, the step would end otherwise."""
asked: Counter[str] = Counter()


def where() -> str:
    """The line of ours that asks."""
    frames = [frame for frame in traceback.extract_stack() if "site-packages" not in frame.filename]
    places = {frame.filename for frame in frames} - {__file__, cpu_shim.__file__} or {__file__}
    frame = next(frame for frame in reversed(frames) if frame.filename in places)
    return f"{frame.filename.rpartition('/')[2]}: {frame.line}"


def answered(method):
    """`method` of tensors; of one on the device it is counted, and asked of ones."""

    def asks(tensor, *args, **kwargs):
        if not tensor.is_meta:
            return method(tensor, *args, **kwargs)
        asked[where()] += 1
        told = torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
        if told.ndim == 1:
            told[BAD_RANKS : BAD_RANKS + 1] = 0
        return method(told, *args, **kwargs)

    return asks


class Sending(TorchDispatchMode):
    """Counts what goes to the device."""

    def __init__(self):
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        out = function(*args, **kwargs or {})
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if any(x.is_cpu and x.ndim for x in given) and any(x.is_meta for x in [*made, *given]):
            self.sent += 1
            if not (kwargs or {}).get("non_blocking"):
                asked[f"a copy that is waited for, {where()}"] += 1
        return out


def alone(collective):
    """A collective among one rank: its tensors stay what they are."""

    def done(*args, async_op=False, **kwargs):
        if any(isinstance(x, torch.Tensor) and x.is_meta for x in tree_leaves((args, kwargs))):
            return mock.Mock(wait=lambda: None) if async_op else None
        return collective(*args, async_op=async_op, **kwargs)

    return done


def run(out, case, *, is_control=False) -> dict:
    asked.clear()
    common = {"precision": "bf16", "data": {"global_batch_size": 2}, "optimizer": {"moments": "bf16"}}
    config = run_config(out, common | case)
    training = build_training(config, start_processes(config))
    batches = TrainBatches(config, training.groups)
    for step in range(WARM):
        train_step(training, batches, step + 1)
    asked.clear()
    with Sending() as sending:
        for step in range(COUNTED):
            train_step(training, batches, WARM + step + 1)
            if is_control:
                next(training.parameters()).sum().item()
                torch.ones(3, device="cpu").to(META)
    process_groups.release()
    packs = COUNTED * training.num_micro_batches
    return {"steps": COUNTED, "micro_batches": packs, "asked": dict(asked), "sent": sending.sent}


def main(out, cases):
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        setattr(torch.Tensor, name, answered(getattr(torch.Tensor, name)))
    for name in ("all_reduce", "broadcast"):
        setattr(dist, name, alone(getattr(dist, name)))
    named = torch.Tensor.type
    torch.Tensor.type = lambda x, *to: named(x, *to) if to else named(x).replace("meta.", "")  # Megatron knows few
    process_groups._local_device = lambda: META
    start = process_groups._start_torch_distributed
    process_groups._start_torch_distributed = lambda device: start(torch.device("cpu"))
    setup.device_update = lambda optimizer, parts: DeviceUpdate(optimizer)  # as on a GPU
    told = {name: run(out, case) for name, case in cases.items()}
    print(json.dumps(told | {"control": run(out, {}, is_control=True)}), flush=True)
    process_groups.destroy()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
