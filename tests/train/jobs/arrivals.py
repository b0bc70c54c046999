"""Steps and validations whose micro-batches arrive late: until they are asked to have arrived, their tensors hold
nothing. Prints the losses, and those of micro-batches that were there from the beginning.

Usage: arrivals.py OUT CASES; one rank. CASES is {name: case}, see `layouts.py`. Of `control` nobody waits.
"""

import json
import sys
from dataclasses import replace

from megadit.models.megatron import cpu_shim

cpu_shim.install()

from layouts import run_config  # noqa: E402

from megadit.models.megatron import groups as process_groups  # noqa: E402
from megadit.train.data.distribute import SharedBatches, TrainBatches  # noqa: E402
from megadit.train.data.packs.packed_batch import PackedBatch  # noqa: E402
from megadit.train.engine.setup import build_training, start_processes  # noqa: E402
from megadit.train.engine.step import train_step  # noqa: E402
from megadit.train.engine.validation import _losses, _validation_batches  # noqa: E402

NUM_STEPS = 2
read = SharedBatches.__next__


def late(batches):
    """The next micro-batch, whose copy is done when it is waited for."""
    batch = read(batches)
    tensors = [*batch.tensors.values()]
    values = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0)

    def arrive():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)

    return replace(batch, arrival=arrive)


def run(out, case, next_batch):
    SharedBatches.__next__ = next_batch
    config = run_config(out, case)
    training = build_training(config, start_processes(config))
    batches = TrainBatches(config, training.groups)
    results = [train_step(training, batches, step + 1) for step in range(NUM_STEPS)]
    validated = _losses(training, *_validation_batches(training)) if config.train.distill is None else {}
    process_groups.release()
    return [
        *(value for step in results for value in (step.loss, step.grad_norm, step.critic_loss)),
        *validated.values(),
    ]


def main(out, cases):
    told = {name: [run(out, case, read), run(out, case, late)] for name, case in cases.items()}
    PackedBatch.arrived = lambda batch: batch
    told["control"] = [run(out, {}, read), run(out, {}, late)]
    print(json.dumps(told), flush=True)
    process_groups.destroy()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
