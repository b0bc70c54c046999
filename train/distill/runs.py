"""Training runs of which each makes a bundle or an adapter: the stages of `megadit distill`, the rounds of `reward`."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megadit.infer.commands.tune_sampler import write_defaults
from megadit.infer.sampling.resolve import resolve_settings
from megadit.models.bundle import Bundle
from megadit.models.convert.adapters.files import is_adapter, read_adapter, write_adapter
from megadit.models.shared.cli.command import run_module
from megadit.models.shared.files import atomic_directory
from megadit.models.shared.memory import check_memory_fits
from megadit.train.config.schema import RunConfig
from megadit.train.plan.hardware import this_machines_memory
from megadit.train.plan.recompute import SMALLER, needed_memory, with_recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRun:
    """The training run of a stage."""

    folder: Path
    config: RunConfig
    command: tuple[str, ...]
    """Arguments of `megadit train`."""


def check_memory(runs: Sequence[StageRun], ranks: int) -> None:
    """Raises UserError for a stage that needs far more memory than this machine has."""
    free = this_machines_memory(ranks)
    for run in runs:
        needed = needed_memory(with_recompute(run.config, ranks, free), ranks)
        check_memory_fits(
            needed, free, f"a rank of {run.folder.name}, with its teacher,", f"{SMALLER}; so does --adapter_rank"
        )


def write_student(student: Path, teacher: Bundle, settings: dict[str, Any]) -> None:
    """Write the bundle or adapter of a run next to it, with the student's sampling settings."""
    with atomic_directory(student) as temporary:
        run_module("megadit.train.checkpoints.to_bundle", str(student.parent), str(temporary))
        if is_adapter(temporary):
            write_adapter(temporary, replace(read_adapter(temporary), defaults=settings))
        else:
            write_defaults(Bundle.open(temporary), resolve_settings(teacher.defaults, **settings))


def publish(source: Path, target: Path) -> None:
    with atomic_directory(target) as temporary:
        shutil.copytree(source, temporary, dirs_exist_ok=True)
