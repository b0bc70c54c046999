"""Steps with the update of a GPU and with Megatron's: prints losses, norms, sizes of gradients, how far apart the
weights end, and what the host asked for meanwhile.

Usage: device_update.py OUT CASES [FACTOR]; every rank runs it. CASES is {name: case}, see `layouts.py`; norms are taken
times FACTOR.
"""

import json
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megadit.models.megatron import cpu_shim

if __name__ == "__main__" and not torch.cuda.is_available():
    cpu_shim.install()

from layouts import randomise_initial_values, run_config  # noqa: E402

from megadit.models.megatron import groups as process_groups  # noqa: E402
from megadit.train.data.distribute import TrainBatches  # noqa: E402
from megadit.train.engine import device_update, setup
from megadit.train.engine.device_update import DeviceUpdate  # noqa: E402
from megadit.train.engine.setup import build_training, start_processes  # noqa: E402
from megadit.train.engine.step import train_step  # noqa: E402
from megadit.train.monitoring.statistics import Statistics  # noqa: E402
from megadit.train.optim import optimizer
from megadit.train.optim.state import held  # noqa: E402

NUM_STEPS = 3
asked = []


class Asking(TorchDispatchMode):
    """Notes each number that the host asks for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            asked.append(str(function))
        return function(*args, **kwargs or {})


def fuse(adamw):
    """As on a GPU."""
    for group in adamw.param_groups if isinstance(adamw, torch.optim.AdamW) else ():
        group.update(fused=True, foreach=False)


class Watched(DeviceUpdate):
    def finalize(self, *args, **options):
        with Asking():
            super().finalize(*args, **options)

    def prepare(self):
        with Asking():
            return super().prepare()

    def step(self, norm):
        with Asking():
            super().step(norm)


def run(out, case, update):
    setup.device_update = update
    config = run_config(out, case)
    training = build_training(config, start_processes(config))
    batches = TrainBatches(config, training.groups)
    with Statistics(training, is_due=True) as sizes:
        results = [train_step(training, batches, 1)]
    results += [train_step(training, batches, step + 1) for step in range(1, NUM_STEPS)]
    own = {name: held(parameter)[1].float().clone() for name, parameter in training.named_parameters()}
    weights = {name: value for name, value in own.items() if value.numel()}  # of few rows some ranks have none
    process_groups.release()
    return results, weights, {name: size["rms"] for name, size in sizes.found["gradient"].items()}


def main(out, cases, factor):
    optimizer.fuse_updates = fuse
    norm = device_update._norm
    device_update._norm = lambda *inputs: norm(*inputs) * factor
    randomise_initial_values()
    told = {}
    for name, case in cases.items():
        asked.clear()
        plain, expected, of_plain = run(out, case, lambda *made: None)
        ours, found, of_ours = run(out, case, lambda made, parts: Watched(made))
        apart = max((((found[key] - expected[key]).norm() / expected[key].norm()).item(), key) for key in expected)
        told[name] = {
            "apart": apart,
            "losses": [[step.loss for step in steps] for steps in (plain, ours)],
            "norms": [[step.grad_norm for step in steps] for steps in (plain, ours)],
            "gradients": [[of[name] for name in sorted(of)] for of in (of_plain, of_ours)],
            "asked": len(asked),
            "checksums": [step.sample_checksum for step in plain] == [step.sample_checksum for step in ours],
        }
    if torch.distributed.is_initialized():
        process_groups.destroy()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 1.0)
