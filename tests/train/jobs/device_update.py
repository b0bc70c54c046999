"""Steps with the update of a GPU and with Megatron's: prints losses, norms, how far apart the weights end, and what the
host asked for meanwhile.

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
from megadit.train import device_update, setup  # noqa: E402
from megadit.train.data.distribute import TrainBatches  # noqa: E402
from megadit.train.device_update import DeviceUpdate  # noqa: E402
from megadit.train.setup import build_training, start_processes  # noqa: E402
from megadit.train.step import train_step  # noqa: E402

NUM_STEPS = 4
asked = []


class Asking(TorchDispatchMode):
    """Notes each number that the host asks for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            asked.append(str(function))
        return function(*args, **kwargs or {})


class Watched(DeviceUpdate):
    def finalize(self, *args, **options):
        with Asking():
            super().finalize(*args, **options)

    def prepare(self):
        with Asking():
            return super().prepare()

    def step(self):
        with Asking():
            super().step()


def run(out, case, update):
    setup.device_update = update
    config = run_config(out, {**case, "optimizer": {"moments": "bf16"} | case.get("optimizer", {})})
    training = build_training(config, start_processes(config))
    batches = TrainBatches(config, training.groups)
    results = [train_step(training, batches, step + 1) for step in range(NUM_STEPS)]
    weights = {name: parameter.detach().float().clone() for name, parameter in training.named_parameters()}
    process_groups.release()
    return results, weights


def main(out, cases, factor):
    square = device_update._square
    device_update._square = lambda *inputs: square(*inputs) * factor**2
    randomise_initial_values()
    told = {}
    for name, case in cases.items():
        asked.clear()
        plain, expected = run(out, case, lambda optimizer, parts: None)
        ours, found = run(out, case, lambda optimizer, parts: Watched(optimizer))
        apart = max((((found[key] - expected[key]).norm() / expected[key].norm()).item(), key) for key in expected)
        told[name] = {
            "apart": apart,
            "losses": [[step.loss for step in steps] for steps in (plain, ours)],
            "norms": [[step.grad_norm for step in steps] for steps in (plain, ours)],
            "asked": len(asked),
            "checksums": [step.sample_checksum for step in plain] == [step.sample_checksum for step in ours],
        }
    if torch.distributed.is_initialized():
        process_groups.destroy()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 1.0)
