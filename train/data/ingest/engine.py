"""A preparation as tasks of Ray, for those who have a cluster of it; ours are ranks of torchrun and arrays of Slurm.

Each stage that parts divide becomes so many tasks, the same command with `--part 0/N` to `--part N-1/N`; the others run
where the command was given. Bytes are those of any other way, and a task that dies is started again by Ray and goes on.
All machines must see the source and the output under the same paths.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megadit.models.shared.errors import UserError, choose_one

ENGINES = ("none", "ray")
LOCAL_OPTIONS = ("--overwrite",)
"""What the first process does alone, before any task."""


def choose_engine(name: str) -> str:
    """Raises UserError for what is none."""
    return choose_one(name, ENGINES, f"--engine: unknown engine {name!r}")


def run_on_ray(
    prepare: Callable[[str, list[str]], int],
    kind: str,
    argv: Sequence[str],
    *,
    stages: Sequence[tuple[str, bool]],
    num_workers: int,
    num_tasks: int | None,
) -> None:
    """Runs each of the `stages` (name, whether parts divide it) on the cluster of RAY_ADDRESS, or on this machine.

    Args:
        prepare: the command, of a source and its arguments `argv`.
        num_workers: decoding processes of a task, each of which needs a core.
        num_tasks: of a stage; None: as many as the cluster has room for.

    Raises:
        UserError: without Ray; where a task found a mistake.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise UserError("--engine ray needs Ray; pip install 'megadit[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    resources = ray.cluster_resources()
    cores = max(1, num_workers)
    count = num_tasks or max(1, int(resources.get("CPU", 1)) // cores)
    task = ray.remote(num_cpus=cores, num_gpus=min(1, resources.get("GPU", 0)))(_run_part)
    words = [word for word in argv if word not in LOCAL_OPTIONS]
    for stage, is_shared in stages:
        command = [*words, "--engine", "none", "--stages", stage]
        if not is_shared:
            prepare(kind, command)
            continue
        parts = [task.remote(prepare, kind, [*command, "--part", f"{n}/{count}"], Path.cwd()) for n in range(count)]
        try:
            ray.get(parts)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, UserError) else error from None
        print(f"{stage}: {count} tasks of Ray", flush=True)


def _run_part(prepare: Callable[[str, list[str]], int], kind: str, argv: list[str], folder: Path) -> None:
    """A task, in the folder of the command."""
    os.chdir(folder)
    prepare(kind, argv)
