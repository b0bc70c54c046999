"""The training command: `megadit train`, or `python -m megadit.train` under torchrun."""

import functools
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, prod

from megadit.models.megatron.launch import launch, rank_arguments
from megadit.models.shared.cli.command import run_command
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError, report_once
from megadit.models.shared.resources import ANYWAY_HELP
from megadit.train.config.load import resolve_config, to_yaml
from megadit.train.config.rules import check_inputs, check_layout
from megadit.train.config.schema import RunConfig
from megadit.train.recipes import RECIPES


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    recipe: str | None = setting(None, "recipe to start from", names=("--recipe", "--factory"), metavar="NAME")
    config_file: str | None = setting(
        None, "YAML or TOML with values to change (train/conf/ has examples)", names=("--config-file",), metavar="FILE"
    )
    mock: bool = setting(False, "train on endless random samples; same as data.mock=true")
    dataset_path: str | None = setting(None, "same as data.path=FOLDER", names=("--dataset-path",), metavar="FOLDER")
    yes: bool = setting(False, "accepted for scripts of NeMo; has no effect", names=("--yes", "-y"))
    nproc: int | None = setting(None, "start N ranks on this machine", low=1, metavar="N")
    print_config: bool = setting(False, "print the resolved configuration and stop", names=("--print-config",))
    dry_run: bool = setting(
        False, "print size, memory, time, FLOPs, communication and warnings; train nothing", names=("--dry-run",)
    )
    plan: bool = setting(False, "rank all layouts of --gpus N --gpu NAME; train nothing")
    tune: bool = setting(False, "measure the planner's best layouts on --nproc N ranks; write the fastest as YAML")
    top: int = setting(5, "number of layouts that --tune measures (default: {default})", low=1, metavar="N")
    tune_steps: int = setting(10, "steps that --tune times for each layout (default: {default})", low=1, metavar="N")
    tune_seconds: float = setting(
        900.0, "seconds after which --tune counts a layout as hung (default: {default})", above=0
    )
    explain: bool = setting(False, "break down the step time of the layout as configured (with --plan)")
    gpus: int | None = setting(None, "number of GPUs, for --plan and --dry-run", low=1, metavar="N")
    gpu: str | None = setting(None, "GPU model such as h100-80gb, for --plan, --dry-run and --tune", metavar="NAME")
    even_if_too_large: bool = setting(False, ANYWAY_HELP)
    debug: bool = setting(False, "show the traceback of user errors")
    overrides: tuple[str, ...] = setting((), "change single values", positional=True, metavar="section.key=value")


GROUPS: dict[str, tuple[str, ...]] = {
    "most used": ("recipe", "config_file", "dataset_path", "mock", "nproc", "dry_run", "print_config"),
    "planning": ("plan", "explain", "gpus", "gpu"),
    "measuring layouts": ("tune", "top", "tune_steps", "tune_seconds"),
    "other": ("even_if_too_large", "debug", "yes"),
}
EXAMPLES = (
    "megadit train --recipe digits data.path=runs/demo/dataset train.output_dir=runs/mine",
    "megadit train --config-file my_run.yaml --nproc 2 optimizer.lr=0.002",
    "megadit train --recipe pretrain_7b data.path=data/clips --dry-run",
    "megadit train --recipe pretrain_7b --plan --gpus 64 --gpu h100-80gb",
)


def main(argv: list[str] | None = None) -> int:
    """Train; return 0 after the last step, 2 after an error, 128 + signal if a signal ended the run."""
    argv = sys.argv[1:] if argv is None else argv
    return run_command(functools.partial(_run, debug="--debug" in argv), argv, is_run=True)


def _run(argv: list[str], *, debug: bool) -> int:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    with report_once():
        options = _parse(argv)
        for_ranks = rank_arguments(argv, debug=debug) if options.nproc else []
        config = _config(options)
        if options.print_config or options.dry_run or options.plan:
            return _print_plan(config, options) if rank == 0 else 0
        if options.tune:
            return _tune(config, options)
        check_layout(config, options.nproc or world_size)
        check_inputs(config)
    if options.nproc:
        return launch("megadit.train", for_ranks, num_processes=options.nproc)
    if rank == 0:
        _warn_of_shared_store()
    return _train(config, even_if_too_large=options.even_if_too_large)


def _warn_of_shared_store() -> None:
    """Warn that restarted ranks would find stale addresses in the store that torchrun shares over restarts."""
    is_restarted = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    has_agents = int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1
    if has_agents and is_restarted and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        print(
            "note: restarts on several nodes need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment",
            file=sys.stderr,
        )


def _config(options: TrainOptions) -> RunConfig:
    overrides = list(options.overrides)
    if options.mock:
        overrides.insert(0, "data.mock=true")
    if options.dataset_path is not None:
        overrides.insert(0, f"data.path={options.dataset_path}")
    return with_epochs(resolve_config(options.recipe, config_file=options.config_file, overrides=overrides))


def _print_plan(config: RunConfig, options: TrainOptions) -> int:
    """Print the configuration, plan or estimate that was requested in place of training."""
    if options.print_config:
        print(to_yaml(config), end="")
        if not options.dry_run:
            return 0
    from megadit.train.plan import report  # imports torch
    from megadit.train.plan.hardware import find_gpu

    gpu = find_gpu(options.gpu) if options.gpu else None
    gpus = options.gpus or options.nproc or int(os.environ.get("WORLD_SIZE", 0))
    if options.plan:
        (report.explain if options.explain else report.plan)(config, gpus, gpu)
        return 0
    comment = "# " if options.print_config else ""  # after the YAML
    for line in report.dry_run(config, gpus or config.parallel.sizes.smallest_world, gpu):
        print(f"{comment}{line}")
    return 0


def _tune(config: RunConfig, options: TrainOptions) -> int:
    from megadit.train.plan.hardware import find_gpu, this_device
    from megadit.train.plan.tune import tune

    gpu = find_gpu(options.gpu) if options.gpu else this_device(options.nproc)
    tune(config, gpu, ranks=options.nproc, top=options.top, steps=options.tune_steps, seconds=options.tune_seconds)
    return 0


def _train(config: RunConfig, *, even_if_too_large: bool) -> int:
    from megadit.models.megatron import cpu_shim

    cpu_shim.install()  # before anything imports Megatron; does nothing on a GPU
    from megadit.train.engine.loop import train

    train(config, even_if_too_large=even_if_too_large)
    return 0


def _parse(argv: list[str]) -> TrainOptions:
    width = max(map(len, RECIPES))
    names = sorted(RECIPES, key=lambda name: not name.startswith("digits"))  # first what two CPU cores train in minutes
    recipes = "\n".join(f"  {name:{width}}  {(RECIPES[name].__doc__ or '').partition(chr(10))[0]}" for name in names)
    options = read_options(
        TrainOptions,
        argv,
        prog="megadit train",
        groups=GROUPS,
        examples=EXAMPLES,
        usage="megadit train --recipe NAME [options] [section.key=value ...]",
        description="Trains a DiT on Megatron-core. Later wins: recipe < --config-file < section.key=value.",
        epilog=f"recipes:\n{recipes}\n\nSeveral ranks: --nproc N, or torchrun ... -m megadit.train (the same options).",
    )
    if options.plan and not (options.gpus and options.gpu):
        raise UserError("--plan needs --gpus N and --gpu NAME, such as --gpus 64 --gpu h100-80gb")
    if options.explain and not options.plan:
        raise UserError("--explain belongs to --plan --gpus N --gpu NAME")
    if options.tune and not options.nproc:
        raise UserError("--tune needs --nproc N: the ranks of this machine that it measures with")
    if options.gpus and not (options.plan or options.dry_run) or options.gpu and not _asks_planner(options):
        raise UserError("--gpus and --gpu belong to --plan and --dry-run; --nproc N or torchrun start ranks")
    return options


def _asks_planner(options: TrainOptions) -> bool:
    return options.plan or options.dry_run or options.tune


# --- Conversion of epochs to steps ------------------------------------------------------------------------------------

MOST_PROBED = 1000
"""Number of samples whose sizes decide the estimate of samples per pack."""


def with_epochs(config: RunConfig) -> RunConfig:
    """`config` with `train.max_epochs`, if set, replaced by the corresponding `train.train_iters`.

    An epoch is as many samples as the training split has. Samples per step are estimated by packing the first
    `MOST_PROBED` by their video tokens; if texts fill packs first, the run sees fewer samples.

    Raises:
        UserError: if the number of samples is not known, or none of them has a valid size.
    """
    epochs = config.train.max_epochs
    if epochs is None:
        return config
    _require_a_size(config)
    from megadit.train.dataset.dataset_info import DatasetInfo  # torch comes with it

    info = DatasetInfo.read(config.data.path)
    samples = info.num_samples.get("train", 0)
    steps = ceil(epochs * samples / (config.data.global_batch_size * _samples_of_a_pack(config, info)))
    return replace(config, train=replace(config.train, train_iters=max(1, steps), max_epochs=None))


def _require_a_size(config: RunConfig) -> None:
    path, why = config.data.path, None
    if config.data.mock:
        why = "data.mock=true has no end"
    elif path is None:
        why = "data.path is not set"
    elif str(path).endswith((".yaml", ".yml")):
        why = f"{path} blends data sets, whose epochs end at different times"
    if why is not None:
        raise UserError(f"train.max_epochs={config.train.max_epochs:g} needs a data set of known size, and {why}; "
                        "give train.train_iters (trainer.max_steps)")  # fmt: skip


def _samples_of_a_pack(config: RunConfig, info) -> float:
    from megadit.models.tokenizers import load_tokenizer
    from megadit.train.data.packs.bin_packing import best_fit
    from megadit.train.dataset.dataset_info import iter_descriptions

    tokenizer, capacity = load_tokenizer(info.tokenizer_folder), config.data.seq_length
    lengths = []
    for sample in islice(iter_descriptions(info.root, "train"), MOST_PROBED):
        with suppress(UserError):  # invalid size: readers leave it out, too
            frames, *sides = tokenizer.latent_shape(sample.num_frames, sample.height, sample.width)[-3:]
            tokens = prod(config.model.sample_grid(min(frames, config.data.max_frames or frames), *sides))
            lengths += [(tokens, 1)] if tokens <= capacity else []
    if not lengths:
        raise UserError(f"{info.root}: no sample of known size fits into data.seq_length={capacity}; raise that")
    return len(lengths) / len(best_fit(lengths, (capacity, config.data.text_seq_length)))


if __name__ == "__main__":
    raise SystemExit(main())
