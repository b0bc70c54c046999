"""Trains one network of each family in one process, and notes what it learns.

Usage: families.py FOLDER SECONDS. FOLDER/families.json says which ({name: [recipe, overrides]}); of each,
FOLDER/NAME.json has the losses and FOLDER/NAME is its `train.output_dir`. Each trains for so many seconds of processor
time, and for the steps of its recipe at least.
"""

import contextlib
import itertools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from megadit.models.megatron import cpu_shim

if __name__ == "__main__":
    cpu_shim.install()

from megadit.models.megatron import groups as process_groups  # noqa: E402
from megadit.train.config.load import resolve_config  # noqa: E402
from megadit.train.data.distribute import TrainBatches  # noqa: E402
from megadit.train.engine.loop import train  # noqa: E402
from megadit.train.engine.schedule import evaluation  # noqa: E402
from megadit.train.engine.setup import build_training, start_processes  # noqa: E402
from megadit.train.engine.step import train_step  # noqa: E402
from megadit.train.engine.validation import _losses, _validation_batches  # noqa: E402
from megadit.train.monitoring.metrics import METRICS_FILE  # noqa: E402

STEPS_BY_HEART = 60
TOKENS_BY_HEART = {"seq_length": 96, "text_seq_length": 64}


@contextlib.contextmanager
def built(config):
    """The parts of a run that has not begun."""
    yield build_training(config, start_processes(config))
    process_groups.destroy()


def losses_by_heart(config):
    """Of the same few samples, with the same noise, again and again."""
    config = replace(
        config,
        data=replace(config.data, **TOKENS_BY_HEART),
        train=replace(config.train, train_iters=STEPS_BY_HEART),
    )
    with built(config) as training:
        batch = next(TrainBatches(config, training.groups)).arrived()
        return [train_step(training, itertools.repeat(batch), 1 + step).loss for step in range(STEPS_BY_HEART)]


def look_at_the_start(config):
    """(validation loss of the initial weights, parameters, seconds of processor time of a step)."""
    with built(config) as training:
        with evaluation(training):
            loss = _losses(training, *_validation_batches(training))["mean"]
        batches = TrainBatches(config, training.groups)
        train_step(training, batches, 1)  # what is done once
        start = time.process_time()
        for step in (2, 3, 4):
            train_step(training, batches, step)
        seconds = (time.process_time() - start) / 3
        return loss, sum(parameter.numel() for parameter in training.parameters()), seconds


def run(folder, name, recipe, overrides, seconds):
    """Numbers of one family."""
    out = folder / name
    config = resolve_config(recipe, overrides=[*overrides, f"train.output_dir={out}"])
    by_heart = losses_by_heart(config)
    before, num_parameters, seconds_of_step = look_at_the_start(config)
    num_steps = max(config.train.train_iters, round(seconds / seconds_of_step))
    start = time.process_time()
    train(
        replace(
            config,
            train=replace(config.train, train_iters=num_steps),
            validation=replace(config.validation, interval=num_steps),
            checkpoint=replace(config.checkpoint, save_interval=num_steps),
        )
    )
    last = json.loads((out / METRICS_FILE).read_text().splitlines()[-1])
    return {
        "num_parameters": num_parameters,
        "by_heart": by_heart,
        "before": before,
        "after": {average: losses["mean"] for average, losses in last["validation"].items()},
        "num_steps": last["step"],
        "seconds": time.process_time() - start,
    }


def main():
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    for name, (recipe, overrides) in json.loads((folder / "families.json").read_text()).items():
        (folder / f"{name}.json").write_text(json.dumps(run(folder, name, recipe, overrides, seconds)))


if __name__ == "__main__":
    main()
