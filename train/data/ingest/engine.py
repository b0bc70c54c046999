"""A preparation as tasks of Ray, for those who have a cluster of it; ours are ranks of torchrun and arrays of Slurm.

Each stage that shards divide becomes N tasks, the same command with `--shard 0/N` to `--shard N-1/N`; the others run
where the command was given. Bytes are those of any other way, and a task that dies is started again by Ray and goes on.
All machines must see the source and the output under the same paths.
"""

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
    """The module, connected to the cluster of RAY_ADDRESS, or to one on this machine.

    Raises:
        UserError: without Ray.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise UserError("--engine ray needs Ray; pip install 'megadit[ray]'") from None
    if not ray.is_initialized():
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
    """Runs each of the `stages` (name, whether parts divide it), those that parts divide as tasks.

    Args:
        prepare: does a part, such as "0/2", of a stage.
        num_workers: decoding processes of a task, each of which has a core where a node has so many.
        num_tasks: of a stage; None: as many as the cluster has room for.

    Raises:
        UserError: where a task found a mistake; where no node has a core.
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
    """(cores and GPUs of a task, how many tasks have room): a task that asked for more than any node has would wait
    for ever.

    Raises:
        UserError: where no node has a core.
    """
    gpus = int(any(node.get("GPU", 0) >= 1 for node in nodes))
    able = [node for node in nodes if node.get("GPU", 0) >= gpus and node.get("CPU", 0) >= 1]
    if not able:
        raise UserError(f"--engine ray: no node of the cluster has a core{' beside its GPU' if gpus else ''}")
    cores = max(1, min(num_workers, int(max(node["CPU"] for node in able))))
    tasks_that_fit = (min(node["CPU"] // cores, node["GPU"] if gpus else math.inf) for node in able)
    return cores, gpus, int(sum(tasks_that_fit))


def _run_shard(prepare: Callable[[str, str], None], stage: str, part: str, folder: Path) -> None:
    """A task, in the folder of the command."""
    os.chdir(folder)
    prepare(stage, part)
