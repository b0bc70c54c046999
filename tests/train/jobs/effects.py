"""Runs the training command under many settings in one process, and notes all that can be seen of each run.

Usage: effects.py FOLDER. FOLDER/runs.json says what to run ({name: {"arguments", "saves", "reads_tensors"}}); of each,
FOLDER/NAME.json has what was seen, in the last checkpoint where its tensors are to be read, and FOLDER/NAME is its
`train.output_dir`. Runs that are not asked to save leave no checkpoint, which is a third of what they take.
"""

import contextlib
import hashlib
import io
import json
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

from megadit.models.megatron import cpu_shim

if __name__ == "__main__":
    cpu_shim.install()

from megadit.infer.media.video_io import read_video  # noqa: E402
from megadit.models.megatron.checkpoint import TENSORS, _read, find_checkpoints  # noqa: E402
from megadit.models.megatron.integrity import read_description  # noqa: E402
from megadit.models.ops import ledger  # noqa: E402
from megadit.models.ops.offload import HostMemory  # noqa: E402
from megadit.train.__main__ import main as train  # noqa: E402
from megadit.train.engine import loop
from megadit.train.monitoring.metrics import Metrics  # noqa: E402

OF_TIME = {"seconds", "reading_seconds", "samples_per_s", "tokens_per_s", "tflops", "mfu", "time"}
"""What differs between two runs of one command."""
OF_TIME_PRINTED = r"train_step_timing in s: \S+|ETA: .*|\S+ \S+ are free|in the last .* s|estimated time: .*"


class Notes:
    """What is seen of a run while it goes on."""

    def __init__(self) -> None:
        self.layout: dict | None = None
        self.recomputed = 0
        self.offloaded = 0
        self.there: list[list[str]] = []
        self.wandb: list[dict] = []


@contextlib.contextmanager
def watched(notes, saves):
    """Looks on from the places where the loop calls others."""
    build, log, checkpoint, close = loop.build_training, Metrics.log, ledger.checkpoint, HostMemory.close
    save = loop._Run._save if saves else lambda run, metrics: None

    def build_training(config, groups):
        training = build(config, groups)
        notes.layout = describe(training)
        return training

    def note_checkpoints(metrics, values):
        root = Path(metrics._config.train.output_dir) / "checkpoints"
        notes.there.append([path.name for path in find_checkpoints(root)])
        log(metrics, values)

    def count(*arguments, **settings):
        notes.recomputed += 1
        return checkpoint(*arguments, **settings)

    def count_offloaded(memory):
        notes.offloaded += 1
        close(memory)

    with (
        mock.patch.object(loop, "build_training", build_training),
        mock.patch.object(Metrics, "log", note_checkpoints),
        mock.patch.object(ledger, "checkpoint", count),
        mock.patch.object(HostMemory, "close", count_offloaded),
        mock.patch.object(loop._Run, "_save", save),
    ):
        yield


def describe(training):
    """Who computes what: the sizes of all groups, and Megatron's objects."""
    groups, part = training.groups, training.parts[0]
    sizes = [groups.tensor, groups.pipeline, groups.context.heads, groups.context.ring, groups.readers]
    return {
        "groups": [group.size() for group in sizes],
        "parts": [type(part).__name__ for part in training.parts],
        "optimizer": type(training.optimizer).__name__,
        "micro-batches": training.num_micro_batches,
        "overlaps": [part.ddp_config.overlap_grad_reduce, part.ddp_config.overlap_param_gather],
        "sequence parallel": training.network.config.sequence_parallel,
        "modules": sorted({type(module).__name__ for module in training.network.modules()}),
    }


def stand_in_for_wandb(calls):
    """A module of that name which notes what it is started with."""
    module = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    ignore = SimpleNamespace(log=lambda *args, **kwargs: None, finish=lambda: None, define_metric=lambda *a, **k: None)

    def init(**settings):
        calls.append(
            {key: settings[key] for key in ("project", "entity", "name")} | {"dir": Path(settings["dir"]).name}
        )
        return ignore

    module.init, module.Settings = init, dict
    return module


def run(folder, name, arguments, saves, reads_tensors):
    """What is seen of one run."""
    out, notes, told = folder / name, Notes(), io.StringIO()
    sys.modules["wandb"] = stand_in_for_wandb(notes.wandb)
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    try:
        with watched(notes, saves), contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            code = train([argument.replace("{out}", str(out)) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    printed = re.sub(OF_TIME_PRINTED, "", told.getvalue()).replace(str(out), "OUT")
    return {
        "error": printed.strip().splitlines()[-1] if code else None,
        "printed": re.sub(r"\d+% of", "", printed).splitlines(),
        "metrics": lines(out / "metrics.jsonl"),
        "events": lines(out / "events.jsonl"),
        "files": files(out),
        "videos": {path.name: digest(read_video(path)[0].tobytes()) for path in sorted(out.rglob("step_*/*.*"))},
        "threads": torch.get_num_threads(),
        "matmul": torch.backends.mkldnn.matmul.fp32_precision,
        **(tensors(out) if reads_tensors else {}),
        **{key: getattr(notes, key) for key in ("layout", "recomputed", "offloaded", "there", "wandb")},
    }


def lines(path):
    """Objects of a file with one on each line, but for times; None where there is no such file."""
    if not path.is_file():
        return None
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in OF_TIME} for line in found]


def files(out):
    """Everything in a run's folder, by name; names that tell a time without it."""
    names = (path.relative_to(out).as_posix() for path in out.rglob("*"))
    return sorted(re.sub(r"events\.out\..*", "events", name) for name in names)


def tensors(out):
    """Names of all tensors of the last checkpoint, and what the weights are."""
    found = find_checkpoints(out / "checkpoints")
    if not found:
        return {"names": None, "weights": None}
    weights = _read(found[-1] / TENSORS, "model.")
    whole = b"".join(name.encode() + weights[name].float().numpy().tobytes() for name in sorted(weights))
    names = sorted(read_description(found[-1] / TENSORS).state_dict_metadata)
    return {"names": names, "weights": digest(whole)}


def digest(content):
    return hashlib.sha256(content).hexdigest()


def main():
    folder = Path(sys.argv[1])
    for name, settings in json.loads((folder / "runs.json").read_text()).items():
        (folder / f"{name}.json").write_text(json.dumps(run(folder, name, **settings)))


if __name__ == "__main__":
    main()
