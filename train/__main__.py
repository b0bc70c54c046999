"""The training command: `megadit train`, or `python -m megadit.train` under torchrun."""

import argparse
import functools
import math
import os
import sys

from megadit.models.support import UserError, nearest, run_command
from megadit.train.config import RunConfig, check_inputs, check_layout
from megadit.train.overrides import resolve_config, to_yaml
from megadit.train.recipes import RECIPES


def main(argv: list[str] | None = None) -> int:
    """Trains; the exit code is 0, or 2 after a mistake in the command line, told in one line."""
    argv = sys.argv[1:] if argv is None else argv
    return run_command(functools.partial(_run, debug="--debug" in argv), argv)


def _run(argv: list[str], *, debug: bool) -> int:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        options, overrides = _parse(argv)
        config = resolve_config(options.recipe, config_file=options.config_file, overrides=overrides)
        if not options.print_config:
            check_layout(config, options.nproc or world_size)
        if not (options.print_config or options.dry_run):
            check_inputs(config)
    except UserError:
        if rank == 0:  # every rank finds the same mistake; one of them says so
            raise
        return 2
    if options.print_config or options.dry_run:
        if rank == 0:
            print(to_yaml(config), end="")
            if options.dry_run:
                print(_size_summary(config))
        return 0
    if options.nproc:
        from megadit.train.launch import launch

        rank_argv = _without_nproc(argv) + (["--debug"] if debug else [])
        return launch("megadit.train", rank_argv, num_processes=options.nproc)
    return _train(config)


def _train(config: RunConfig) -> int:
    import torch

    if not torch.cuda.is_available():
        from megadit.models.megatron import cpu_shim

        cpu_shim.install()  # before anything imports Megatron
    from megadit.train.loop import train

    train(config)
    return 0


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what remains: the `a.b=c` overrides, which may stand anywhere among them."""
    parser = _parser()
    try:
        options, overrides = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; see `megadit train --help`") from error
    for argument in overrides:
        if argument.startswith("-"):
            near = nearest(argument.partition("=")[0], parser._option_string_actions)
            hint = f"did you mean {near}?" if near else "see `megadit train --help`"
            raise UserError(f"unknown option {argument}; {hint}")
    if options.nproc is not None and options.nproc < 1:
        raise UserError(f"--nproc {options.nproc} must be 1 or more")
    if options.nproc and "RANK" in os.environ:
        raise UserError("--nproc starts ranks itself; leave it out under torchrun")
    if options.mock:
        overrides = ["data.mock=true", *overrides]
    if options.dataset_path is not None:
        overrides = [f"data.path={options.dataset_path}", *overrides]
    return options, overrides


def _parser() -> argparse.ArgumentParser:
    recipes = "\n".join(
        f"  {name:18}{(function.__doc__ or '').partition(chr(10))[0]}" for name, function in RECIPES.items()
    )
    parser = argparse.ArgumentParser(
        prog="megadit train",
        usage="megadit train --recipe NAME [options] [section.key=value ...]",
        description="Trains a DiT on Megatron-core. Later wins: recipe < --config-file < section.key=value.",
        epilog=f"recipes:\n{recipes}\n\nSeveral ranks: --nproc N, or torchrun ... -m megadit.train (the same options).",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--recipe", "--factory", metavar="NAME", help="the run to start from")
    parser.add_argument("--config-file", metavar="FILE", help="YAML with values to change (train/conf/ has examples)")
    parser.add_argument("--mock", action="store_true", help="endless random samples; same as data.mock=true")
    parser.add_argument("--dataset-path", metavar="FOLDER", help="same as data.path=FOLDER")
    parser.add_argument("--yes", "-y", action="store_true", help="NeMo's; nothing is asked here")
    parser.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("--dry-run", action="store_true", help="also count the model's parameters; train nothing")
    parser.add_argument("--debug", action="store_true", help="show the traceback of user errors")
    return parser


def _size_summary(config: RunConfig) -> str:
    """Parameters and tokens as YAML comments, so that the output of a dry run is still a configuration."""
    from megadit.models.weights import dit_shapes  # builds the model on the meta device, without memory

    parameters = sum(math.prod(shape) for shape in dit_shapes(config.model).values())
    tokens = config.data.global_batch_size * config.data.seq_length
    return (
        f"# parameters: {parameters:,}\n"
        f"# video tokens: {tokens:,} a step, {tokens * config.train.train_iters:,} in all (at most: packs have a tail)"
    )


def _without_nproc(argv: list[str]) -> list[str]:
    """The same command line for one of the ranks."""
    kept, skip = [], False
    for argument in argv:
        if not skip and argument != "--nproc" and not argument.startswith("--nproc="):
            kept.append(argument)
        skip = argument == "--nproc"
    return kept


if __name__ == "__main__":
    raise SystemExit(main())
