"""Prints, as JSON, the most memory that a rank took under FSDP: while it built the network, and in a step.

fsdp_peak.py a.b=c ...     overrides of the recipe digits_tiny; every rank runs it. Beside it stand two mistakes that
raise nothing: weights that stay gathered, and a network that is made whole before it is cut.
"""

import ctypes
import gc
import json
import os
import sys
from functools import partial

from megadit.models.megatron import cpu_shim

cpu_shim.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from memory import resident, settle  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402

from megadit.models.megatron import groups as process_groups  # noqa: E402
from megadit.train.config.load import resolve_config  # noqa: E402
from megadit.train.data.distribute import TrainBatches  # noqa: E402
from megadit.train.engine import building, setup  # noqa: E402
from megadit.train.engine.step import train_step  # noqa: E402

M_MMAP_THRESHOLD = -3


def return_what_is_freed():
    """Tensors go back to the system at once: the size of the process follows them."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**17)  # what training sets otherwise, it leaves alone
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**17)


def keep_gathered(training):
    for module in training.network.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(False)


def make_whole():
    """From now on; a function that ends it."""
    build = building._build_network
    building._build_network = lambda *args: build(*args[:-1], torch.device("cpu"))
    return partial(setattr, building, "_build_network", build)


def measure(config, mistake):
    """Bytes of the network; what the process grew by while it was built, kept after a step, and grew by in the next."""
    processes = setup.start_processes(config)
    batches = TrainBatches(config, processes)
    undo = make_whole() if mistake == "made whole" else lambda: None
    before = settle()
    training = setup.build_training(config, processes)
    building = resident("VmHWM") - before
    undo()
    whole = 4 * sum(parameter.numel() for parameter in training.parameters())
    if mistake == "made whole":
        process_groups.release()
        return {"building": building, "whole": whole}
    if mistake == "kept gathered":
        keep_gathered(training)
    train_step(training, batches, 1)  # the optimizer's state appears
    between = settle()
    train_step(training, batches, 2)
    found = {
        "building": building,
        "held": between - before,
        "step": resident("VmHWM") - between,
        "whole": whole,
    }
    process_groups.release()
    return found


def main(overrides):
    return_what_is_freed()
    config = resolve_config("digits_tiny", overrides=["data.mock=true", *overrides])
    found = {}
    for mistake in ("kept gathered", "made whole", "none"):  # the first also loads what nobody has loaded before
        found[mistake] = measure(config, mistake)
        gc.collect()
        dist.barrier()
    print(json.dumps(found))
    process_groups.destroy()


if __name__ == "__main__":
    main(sys.argv[1:])
