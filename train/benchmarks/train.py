"""`megadit benchmark train`: cost of one optimizer step of a recipe on this machine, and its breakdown.

    megadit benchmark train --recipe digits [section.key=value ...] [--nproc 2] [--steps 10] [--json FILE]

The steps are those of `megadit train`, on mock data unless `data.path` is given; nothing of the run is kept. Operations
are counted as `models.flops` says (recomputation adds nothing), and by the formula of published measurements.
"""

import functools
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megadit.models.megatron.launch import launch, rank_arguments
from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import report_once
from megadit.models.shared.files import write_json
from megadit.models.shared.progress import Progress
from megadit.models.shared.resources import ANYWAY_HELP
from megadit.train.config.load import resolve_config
from megadit.train.config.rules import check_inputs, check_layout
from megadit.train.config.schema import RunConfig
from megadit.train.recipes import RECIPES

if TYPE_CHECKING:
    from megadit.train.benchmarks.measure import StepCosts


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkTrainOptions:
    recipe: str | None = setting(None, "recipe whose steps are timed", metavar="NAME")
    config_file: str | None = setting(None, "YAML with values to change", names=("--config-file",), metavar="FILE")
    nproc: int | None = setting(None, "start N ranks on this machine", low=1, metavar="N")
    steps: int = setting(10, "timed steps (default: {default})", low=1, metavar="N")
    warmup: int = setting(3, "untimed steps before (default: {default})", low=0, metavar="N")
    trace: str | None = setting(None, "also write a Chrome trace of one step (https://ui.perfetto.dev)", metavar="FILE")
    ops: tuple[str, ...] = setting(
        (), "compute an op by one variant, as in attention=reference", repeated=True, metavar="OP=VARIANT"
    )
    json: str = setting("", "also write the results to this file", metavar="FILE")
    even_if_too_large: bool = setting(False, ANYWAY_HELP)
    debug: bool = setting(False, "show the traceback of user errors")
    overrides: tuple[str, ...] = setting((), "change single values", positional=True, metavar="section.key=value")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return run_command(functools.partial(_run, debug="--debug" in argv), argv)


def _run(argv: list[str], *, debug: bool) -> int:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    with report_once():
        options = _parse(argv)
        for_ranks = rank_arguments(argv, debug=debug) if options.nproc else []
        _force(options.ops)
        config = run_of(options.recipe, options.config_file, options.overrides)
        check_layout(config, options.nproc or world_size)
        check_inputs(config)
    if options.nproc:
        return launch("megadit.train.benchmarks.train", for_ranks, num_processes=options.nproc)
    from megadit.models.megatron import cpu_shim

    cpu_shim.install()  # before anything imports Megatron; does nothing on a GPU
    with tempfile.TemporaryDirectory() as folder:
        run = replace(config, train=replace(config.train, output_dir=folder))
        measurements, about = _measure(run, options)
    if rank == 0:
        _print_costs(config, measurements, about, options)
    return 0


def _force(variants: Sequence[str]) -> None:
    if variants:  # torch comes with the ops
        from megadit.models.ops.registry import force_variants

        force_variants(variants)


def _measure(config: RunConfig, options: BenchmarkTrainOptions) -> "tuple[StepCosts, dict[str, Any]]":
    from megadit.models.machine import describe
    from megadit.models.megatron import groups as process_groups
    from megadit.train.benchmarks.measure import measure_steps
    from megadit.train.engine.setup import check_memory, start_processes

    groups = start_processes(config)
    with process_groups.destroyed_at_end():
        if not options.even_if_too_large:
            check_memory(config, groups)
        with Progress(options.warmup + options.steps + 1, "measuring", enabled=groups.is_first) as bar:
            measurements = measure_steps(
                config, groups, warmup=options.warmup, steps=options.steps, trace=options.trace, advance=bar.advance
            )
        return measurements, describe(groups.device) | {"ranks": groups.world_size}


def run_of(recipe: str | None, config_file: str | None, overrides: Sequence[str]) -> RunConfig:
    """The recipe's run, without what a benchmark leaves out: validation, logs, checkpoints."""
    fixed = ["validation.interval=0", "logger.tensorboard=false", "train.output_dir=."]
    config = resolve_config(recipe, config_file=config_file, overrides=[*overrides, *fixed])
    return replace(config, data=replace(config.data, mock=config.data.mock or config.data.path is None))


def _print_costs(
    config: RunConfig, measurements: "StepCosts", about: dict[str, Any], options: BenchmarkTrainOptions
) -> None:
    from megadit.models.machine import describe_in_words
    from megadit.models.ops.registry import describe_variants, variants_run
    from megadit.train.benchmarks.measure import shares_of, table_of

    console = Console()
    console.print(table_of(config, measurements))
    console.print(shares_of(measurements))
    console.print(f"ops: {describe_variants(variants_run())}", soft_wrap=True, highlight=False)
    console.print(describe_in_words(about), soft_wrap=True)
    if options.json:
        record = {"recipe": config.recipe, "config": asdict(config), "steps": options.steps, "machine": about}
        write_json(options.json, record | {"measurements": asdict(measurements), "ops": variants_run()})
        print(options.json)


def _parse(argv: list[str]) -> BenchmarkTrainOptions:
    return read_options(
        BenchmarkTrainOptions,
        argv,
        prog="megadit benchmark train",
        usage="megadit benchmark train --recipe NAME [options] [section.key=value ...]",
        description="Times optimizer steps of a recipe on this machine. Later wins: recipe < --config-file < "
        "section.key=value.",
        epilog=f"recipes: {', '.join(RECIPES)}",
    )


if __name__ == "__main__":
    raise SystemExit(main())
