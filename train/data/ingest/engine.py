"""Preparation by Ray tasks, as an alternative to ranks of torchrun and Slurm arrays.

Each divisible stage becomes N tasks, the same command with `--shard 0/N` to `--shard N-1/N`; other stages run in the
command itself. The resulting bytes are the same, and Ray restarts a task that dies, which then continues.
All machines must see the source and the output under the same paths.
"""

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megadit.models.shared.errors import UserError, choose_one

ENGINES = ("none", "ray")


def choose_engine(name: str) -> str:
    """Raises UserError for an unknown engine."""
    return choose_one(name, ENGINES, f"--engine: unknown engine {name!r}")


def start_ray() -> Any:
    """Return the module `ray`, connected to the cluster of RAY_ADDRESS, or to one on this machine.

    Raises:
        UserError: without Ray.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise UserError("--engine ray needs Ray; pip install 'megadit[ray]'") from None
    if not ray.is_initialized():
        with contextlib.chdir("/"):  # workers import from the folder that is current here, before any other
            ray.init(log_to_driver=False, include_dashboard=False)
    return ray


def run_on_ray(
    ray: Any,
    prepare: Callable[[str, str], None],
    *,
    stages: Sequence[tuple[str, bool]],
    num_workers: int,
    num_tasks: int | None,
) -> None:
    """Run the `stages` (name, whether it is divisible), divisible ones as tasks.

    Args:
        prepare: function that does one shard, such as "0/2", of a stage.
        num_workers: decoding processes per task, each on a core if a node has so many.
        num_tasks: tasks per stage; None: as many as fit on the cluster.

    Raises:
        UserError: if a task raised one, or no node has a core.
    """
    cores, gpus, tasks_that_fit = share([node["Resources"] for node in ray.nodes() if node["Alive"]], num_workers)
    count = num_tasks or tasks_that_fit
    task = ray.remote(num_cpus=cores, num_gpus=gpus)(_run_shard)
    for stage, is_shared in stages:
        if not is_shared:
            prepare(stage, "0/1")
            continue
        parts = [task.remote(prepare, stage, f"{number}/{count}", Path.cwd()) for number in range(count)]
        try:
            ray.get(parts)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, UserError) else error from None
        print(f"{stage}: {count} tasks of Ray", flush=True)


def share(nodes: Sequence[dict[str, float]], num_workers: int) -> tuple[int, int, int]:
    """(cores and GPUs per task, number of tasks that fit): a task that requests more than any node has would wait
    forever.

    Raises:
        UserError: if no node has a core.
    """
    gpus = int(any(node.get("GPU", 0) >= 1 for node in nodes))
    able = [node for node in nodes if node.get("GPU", 0) >= gpus and node.get("CPU", 0) >= 1]
    if not able:
        raise UserError(f"--engine ray: no node of the cluster has a core{' beside its GPU' if gpus else ''}")
    cores = max(1, min(num_workers, int(max(node["CPU"] for node in able))))
    tasks_that_fit = (min(node["CPU"] // cores, node["GPU"] if gpus else math.inf) for node in able)
    return cores, gpus, int(sum(tasks_that_fit))


def _run_shard(prepare: Callable[[str, str], None], stage: str, shard: str, folder: Path) -> None:
    """Body of a task, run in the working directory of the command."""
    os.chdir(folder)
    prepare(stage, shard)
