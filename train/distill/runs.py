"""Training runs of which each makes a bundle or an adapter: the stages of `megadit distill`, the rounds of `reward`."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from megadit.infer.commands.tune_sampler import write_defaults
from megadit.infer.sampling.resolve import resolve_settings
from megadit.models.bundle import Bundle, check_single, check_transformer, open_bundle
from megadit.models.convert.adapters.files import is_adapter, read_adapter, write_adapter
from megadit.models.shared.cli.command import run_module
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_directory
from megadit.models.shared.resources import check_memory_fits
from megadit.train.checkpoints.init_from import UNTRAINED
from megadit.train.config.load import resolve_config
from megadit.train.config.rules import check_layout
from megadit.train.config.schema import RunConfig
from megadit.train.data.writer import is_prepared
from megadit.train.plan.hardware import this_machines_memory
from megadit.train.plan.memory import SMALLER, needed_memory, with_recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRun:
    """The training run of a stage."""

    folder: Path
    config: RunConfig
    command: tuple[str, ...]
    """Arguments of `megadit train`."""


class RunOptions(Protocol):
    """Options of a command that runs `megadit train`."""

    config_file: str | None
    nproc: int
    even_if_too_large: bool


def open_trained(path: str, recipe: str | None) -> tuple[Bundle, str]:
    """The bundle with which the runs begin, and the recipe of their other settings: `recipe`, or the bundle's own.
    Raises UserError for a network that is not trained here, or a bundle that names no recipe."""
    bundle = open_bundle(path)
    check_single(bundle)
    check_transformer(bundle, UNTRAINED)
    recipe = recipe or (bundle.manifest.get("training") or {}).get("recipe")
    if not recipe:
        raise UserError(f"{path} does not say which recipe made it: give --recipe NAME")
    return bundle, recipe


def stage_run(
    folder: Path, recipe: str, overrides: Sequence[str], options: RunOptions, data: Path | None = None
) -> StageRun:
    """A run in `folder`; `data` is a data set that may not be there yet, and is not looked at then. Raises UserError if
    it could not start."""
    source = ["--recipe", recipe, *(["--config-file", options.config_file] if options.config_file else [])]
    ranks = ["--nproc", str(options.nproc)] if options.nproc > 1 else []
    ranks += ["--even_if_too_large"] if options.even_if_too_large else []
    of_data = [] if data is None else [f"data.path={data}"]
    known = of_data if data is not None and is_prepared(data) else []
    config = resolve_config(recipe, config_file=options.config_file, overrides=[*overrides, *known])
    check_layout(config, options.nproc)
    return StageRun(folder=folder, config=config, command=(*source, *ranks, *overrides, *of_data))


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
