"""Training runs: `digits` on its own data set, cut to a few hundred samples, in every kind of layout."""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from golden_parts.commands import megadit
from golden_parts.digests import digest_tensor, digest_tensors, exact
from golden_parts.names import safe_reader
from golden_parts.ranks import done_file, train_all

COMMON = (
    "train.num_threads=1", "checkpoint.async_save=false", "validation.num_batches=1", "optimizer.lr_warmup_iters=5",
    "logger.tensorboard=false", "train.train_iters=20", "checkpoint.save_interval=20", "validation.interval=20",
)  # fmt: skip
SHORT = ("train.train_iters=6", "checkpoint.save_interval=6", "validation.interval=6")
ADAMW = "optimizer.optimizer=adamw"
MOVIEGEN = (
    "model.family=moviegen", "model.num_query_groups=1", "model.position_embedding=learned",
    "model.learned_positions=[3,4,4]", "model.qk_layernorm=false",
)  # fmt: skip
EXPERTS = ("model.experts.num_experts=4", ADAMW, "optimizer.lr=3e-3")
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp1": (1, ()),
    "tp2_sp": (2, ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")),
    "cp2": (2, ("parallel.context_parallel_size=2",)),
    "pp2": (2, ("parallel.pipeline_model_parallel_size=2",)),
    "fsdp2": (2, ("parallel.data_parallel=fsdp", ADAMW)),
    "ep2": (2, ("parallel.expert_model_parallel_size=2", *EXPERTS)),
    # beside what a refactoring must hold in any case: mechanisms of which the six above have none
    "moviegen_bf16_recomputed": (1, ("train.precision=bf16", "parallel.recompute_granularity=full", *MOVIEGEN, *SHORT)),
    "st_dit_cp2_ring": (
        2,
        ("model.family=st_dit", "parallel.context_parallel_size=2", "parallel.context_parallel_comm=ring", *SHORT),
    ),
    "expert_choice_ep2_sp": (
        2,
        (
            *("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
            *("parallel.expert_model_parallel_size=2", "model.experts.routing=expert_choice", *EXPERTS, *SHORT),
        ),
    ),
    "vpp2_distributed_optimizer": (
        2,
        (
            *("parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_model_parallel_size=2"),
            *("parallel.data_parallel=distributed_optimizer", *SHORT),
        ),
    ),
}
"""Name -> ranks, and changes of the recipe."""
SECONDS = ("seconds", "reading_seconds", "samples_per_s", "tokens_per_s", "tflops", "mfu")
"""What differs from run to run."""


def record(work: Path, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    names = [name for name in RUNS if is_wanted(name)]
    for name, out in trained(work, *names).items():
        yield from described(name, out)


def dataset(work: Path) -> Path:
    path = work / "dataset"
    if not path.exists():
        megadit("prepare", "digits", path, "--num_clips", "200", "--num_images", "400", "--num_val", "50")
    return path


def trained(work: Path, *names: str) -> dict[str, Path]:
    """The folders of runs, trained unless they are there."""
    folders = {name: work / "runs" / name for name in names}
    logs = {name: work / f"{name}.log" for name in names}
    missing = {name: out for name, out in folders.items() if not done_file(logs[name]).exists()}
    for out in missing.values():
        shutil.rmtree(out, ignore_errors=True)  # a run that was cut off would be continued
    common = ["--recipe", "digits", f"data.path={dataset(work)}", *COMMON]
    train_all(
        [
            (RUNS[name][0], [*common, f"train.output_dir={out}", *RUNS[name][1]], str(logs[name]))
            for name, out in missing.items()
        ],
        work,
    )
    return folders


def described(name: str, out: Path) -> Iterator[tuple[str, Any]]:
    """Losses, gradient norms and the like of each step, tensors of the checkpoint, frames of the sampled videos."""
    for line in (out / "metrics.jsonl").read_text().splitlines():
        step = {key: value for key, value in json.loads(line).items() if key not in SECONDS}
        yield from exact(step, f"{name}/step_{step['step']:02d}")
    (checkpoint,) = (out / "checkpoints").glob("iter_*")
    yield from digest_tensors(checkpoint_tensors(checkpoint / "tensors"), f"{name}/checkpoint/")
    for video in sorted((out / "samples").glob("*/*.mp4")):
        yield f"{name}/samples/{video.stem}", digest_tensor(frames(video))


def checkpoint_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole."""
    reader = safe_reader()(folder)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if hasattr(entry, "properties")
    }
    assert tensors, f"{folder} holds no tensors"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def frames(video: Path) -> Tensor:
    """THWC, as the file is decoded."""
    import av
    import numpy

    with av.open(str(video)) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return torch.from_numpy(numpy.stack(decoded))
