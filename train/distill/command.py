"""`megadit distill`: trains a student of a bundle that samples in few steps.

    megadit distill BUNDLE OUT --data data/clips --calls 4 --nproc 2

It runs stages, of which each is the teacher of the next: first the student learns the guided teacher in one pass, then
to sample in `--calls` steps. A stage is a run of `megadit train`: it can be resumed, and `STAGE.section.key=value` sets
values of it alone. After each stage the student is compared with the original teacher; if it has collapsed, the command
ends and the previous student is kept.

    megadit distill BUNDLE OUT --data data/clips --calls 4 --adapter_rank 16

With a rank the students are adapters on the teacher's weights, which training holds once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megadit.infer.commands.tune_sampler import write_defaults
from megadit.infer.evaluate.extractors import open_extractors
from megadit.infer.evaluate.videos import open_videos, prompts_of
from megadit.infer.generate.options import refuse
from megadit.infer.pipeline.adapters import adapted_defaults
from megadit.infer.runtimes.torch import use_device
from megadit.models.bundle import Bundle
from megadit.models.convert.adapters.files import is_adapter, read_adapter, write_adapter
from megadit.models.shared.cli.command import run_module
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.files import write_json
from megadit.models.shared.folder_lock import FolderLock
from megadit.models.shared.resources import ANYWAY_HELP
from megadit.train.checkpoints.init_from import check_scales
from megadit.train.config.load import resolve_config
from megadit.train.dataset.dataset_info import draw_captions
from megadit.train.distill.check import Bounds, Comparison, compare
from megadit.train.distill.pairs import DATASET, make_trajectories
from megadit.train.distill.runs import StageRun, check_memory, open_trained, publish, stage_run, write_student
from megadit.train.distill.stages import (
    REGRESSION_OVERRIDES,
    STAGES,
    embedded_scale,
    model_overrides,
    overrides_of,
    student_settings,
    student_sigmas,
)

REGRESSION_DATA = "pairs"
"""Folder of the data of `regression`, next to the folders of the stages."""
FEW_CALLS = 4
"""Number of sampling steps below which the student must learn the distribution of whole videos in each step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillOptions:
    teacher: str = setting(help="a bundle, or a training directory", positional=True, metavar="TEACHER")
    out: Path = setting(
        help="folder for the runs of the stages, and for bundle/ or adapter/, the last student",
        positional=True,
        metavar="OUT",
    )
    data: str | None = setting(
        None, "data set whose texts and conditioning the student sees; same as data.path=FOLDER", metavar="FOLDER"
    )
    recipe: str | None = setting(
        None, "recipe whose data and optimizer settings are used (default: the teacher's)", metavar="NAME"
    )
    config_file: str | None = setting(
        None, "YAML or TOML with values to change", names=("--config-file",), metavar="FILE"
    )
    stages: Sequence[str] = setting(
        (), "objectives, one after the other (default: guidance; then regression, for 3 calls or fewer)", metavar="NAME"
    )
    calls: int = setting(4, "function evaluations of the student for a video (default: {default})", low=1, high=64)
    sigmas: Sequence[float] = setting(
        (), "noise levels of the student's function evaluations, decreasing (default: by --calls)", above=0
    )
    noise_scale: float | None = setting(
        None,
        "initial noise scale of the student's videos (default: the teacher's, mostly 1); below 1 where videos of one "
        "prompt differ more than the teacher's",
        above=0,
    )
    guidance: float | None = setting(None, "guidance scale of the teacher (default: its own)", low=1)
    guidance_embedding_range: Sequence[float] = setting(
        (), "lowest and highest guidance scale of a guidance-distilled student, in place of --guidance", nargs=2
    )
    adapter_rank: int | None = setting(
        None, "rank of the adapters that are trained as students (default: whole networks)", low=1
    )
    nproc: int = setting(1, "ranks on this machine (default: {default})", low=1)
    pairs: Path | None = setting(
        None, "dataset of `megadit prepare trajectories` for regression (default: made with the teacher)"
    )
    num_trajectories: int = setting(
        4096, "videos that the teacher makes for that dataset (default: {default})", above=0
    )
    trajectory_steps: int = setting(
        20, "solver steps of the teacher for each of these videos (default: {default})", above=0
    )
    prompts: str = setting(
        "", "text file with a prompt per line, for the check (default: captions of --data)", metavar="PATH"
    )
    count: int = setting(64, "prompts of the check, two videos each (default: {default})", low=8)
    extractors: Sequence[Path] = setting(
        (), "feature extractors for the check, as for `megadit evaluate` (default: downscaled frames)"
    )
    spread: tuple[float, float] = setting(
        (0.5, 2.0), "allowed diversity of one prompt's videos, as multiples of the teacher's (default: {default})"
    )
    distance: float = setting(
        2.0,
        "largest distance from real videos, as a multiple of the teacher's (default: {default}; needs --extractors)",
        above=0,
    )
    even_if_too_large: bool = setting(False, ANYWAY_HELP)
    device: str = setting(
        "auto", "device for the check: auto, cpu, cuda or cuda:N (default: {default})", metavar="NAME"
    )
    overrides: tuple[str, ...] = setting(
        (), "values of all stages, or [STAGE.]section.key=value of one", positional=True, metavar="section.key=value"
    )


GROUPS: dict[str, tuple[str, ...]] = {
    "most used": ("data", "calls", "stages", "adapter_rank", "nproc", "recipe", "config_file"),
    "sampling of the student": ("sigmas", "noise_scale", "guidance", "guidance_embedding_range"),
    "pairs that regression learns from": ("pairs", "num_trajectories", "trajectory_steps"),
    "check": ("prompts", "count", "extractors", "spread", "distance", "device"),
    "other": ("even_if_too_large",),
}
EXAMPLES = (
    "megadit distill runs/demo/bundle runs/student --data runs/demo/dataset --calls 4",
    "megadit distill bundle runs/student --data data/clips --calls 2 --adapter_rank 16 guidance.train.train_iters=2000",
)


@command(
    DistillOptions,
    groups=GROUPS,
    examples=EXAMPLES,
    prog="megadit distill",
    description="Distills a bundle into a student of few function evaluations.",
    is_run=True,
)
def main(options: DistillOptions) -> None:
    """Runs `megadit distill`; returns its exit code."""
    with FolderLock(options.out, "distills"):
        _distill(options)


def _distill(options: DistillOptions) -> None:
    stages = options.stages or ("guidance", "regression")[: 1 + (options.calls < FEW_CALLS)]
    for name in stages:
        choose_one(name, STAGES, f"--stages {name} is unknown")
    _check_adapter(options)
    for stage in {override.partition(".")[0] for override in options.overrides} & STAGES.keys() - {*stages}:
        raise UserError(f"{stage}.section.key=value names a stage that is not run; the stages are: {', '.join(stages)}")
    refuse(
        options.guidance and options.guidance_embedding_range, "give --guidance or --guidance_embedding_range, not both"
    )
    refuse(options.sigmas and len(options.sigmas) != options.calls, "--sigmas needs as many noise levels as --calls")
    teacher, recipe = open_trained(options.teacher, options.recipe)
    sigmas = tuple(options.sigmas) or student_sigmas(teacher, options.calls)
    guidance_embedding_range = _embedding_range(options, teacher)
    runs = _runs(options, stages, recipe, teacher, sigmas, guidance_embedding_range)
    if not options.even_if_too_large:
        check_memory(runs, options.nproc)
    check = _check(options, teacher)
    before = None
    for number, (name, run) in enumerate(zip(stages, runs, strict=True), start=1):
        student = run.folder / _result(options)
        print(f"[{number}/{len(stages)}] {name}", flush=True)
        if not student.exists():
            if STAGES[name].is_regression and options.pairs is None:
                _make_trajectories(options, teacher)
            run_module("megadit.train", *run.command)
            scale = embedded_scale(teacher.defaults, guidance_embedding_range)
            noise_scale = options.noise_scale or teacher.defaults.noise_scale
            settings = student_settings(STAGES[name].sampler, sigmas, scale, noise_scale)
            write_student(student, teacher, settings)
        elif options.noise_scale:
            _begin_with(student, options.noise_scale)
        found = check(options.out / "check", student)
        write_json(run.folder / "comparison.json", found.to_dict())
        print(f"{student}: {found.text()}", flush=True)
        if (fault := found.fault(_bounds(options))) is not None:
            kept = "no student" if before is None else str(before)
            raise UserError(
                f"{name}: the student has collapsed: {fault} ({found.text()}). {kept} is kept; try a lower "
                f"{name}.optimizer.lr, fewer {name}.train.train_iters, other --sigmas, or (too diverse) a lower "
                "--noise_scale"
            )
        before = student
    out = options.out / _result(options)
    publish(before, out)
    scales = guidance_embedding_range
    how = "without guidance" if scales is None else f"at any guidance from {scales[0]:g} to {scales[1]:g}"
    next_step = f"megadit generate --checkpoint_path {teacher.path} --adapter {out}, or bundle --merge"
    next_step = next_step if options.adapter_rank else "export and serve it"
    print(f"{out}: {len(sigmas)} sampling steps, {how}; {next_step}")


def _embedding_range(options: DistillOptions, teacher: Bundle) -> tuple[float, float] | None:
    """Range of guidance scales of guidance-distilled students, else None. Raises UserError for scales outside the range
    of a guidance-distilled teacher, or a single scale for it."""
    known = teacher.config.guidance_embedding_range
    refuse(
        options.guidance and known,
        "the teacher is guidance-distilled, and so are its students: leave out --guidance, or give a range of scales",
    )
    refuse(
        any("model.guidance_embedding_range=" in override for override in options.overrides),
        "sampling depends on the range of scales: give --guidance_embedding_range, not model.guidance_embedding_range",
    )
    guidance_embedding_range = tuple(options.guidance_embedding_range) or known
    check_scales(guidance_embedding_range, known, options.teacher)
    return guidance_embedding_range


def _check_adapter(options: DistillOptions) -> None:
    """Raises UserError for adapter settings without a rank, or of one stage alone."""
    asked = [override for override in options.overrides if "train.adapter." in override]
    refuse(
        asked and options.adapter_rank is None,
        "a stage begins with the whole network of the one before: give --adapter_rank N to have adapters",
    )
    refuse(
        options.adapter_rank and any(not override.startswith("train.adapter.") for override in asked),
        "each stage continues the adapter of the one before: set train.adapter.* for all stages",
    )
    refuse(
        options.adapter_rank and any("checkpoint.init_from=" in override for override in options.overrides),
        "adapters need the teacher's weights as their base: leave out checkpoint.init_from",
    )


def _result(options: DistillOptions) -> str:
    """Name of a student in the folder of its stage: bundle or adapter."""
    return "adapter" if options.adapter_rank else "bundle"


def _make_trajectories(options: DistillOptions, teacher: Bundle) -> None:
    """Generate the data of `regression` with the original teacher, for captions of the student's data."""
    captions = (
        draw_captions(Path(options.data), "train", options.num_trajectories)
        if options.data
        else prompts_of(options.prompts, None, None, None)
    )
    make_trajectories(
        options.out / REGRESSION_DATA,
        teacher,
        captions,
        count=options.num_trajectories,
        num_steps=options.trajectory_steps,
        guidance=options.guidance or teacher.defaults.guidance,
        num_processes=options.nproc,
    )


def _bounds(options: DistillOptions) -> Bounds:
    return Bounds(least_spread=options.spread[0], most_spread=options.spread[1], most_distance=options.distance)


def _check(options: DistillOptions, teacher: Bundle) -> Callable:
    """Return a function (folder, path of a student) -> `check.Comparison`; its inputs are checked before training."""
    device = use_device(options.device)
    extractors = [each for path in options.extractors for each in open_extractors(path, device)]
    real = None
    if options.data is not None and (extractors or not options.prompts):
        real = open_videos(Path(options.data), None if extractors else options.count)
    refuse(real is None and not options.prompts, "give --data FOLDER, or --prompts FILE for the check")
    prompts = prompts_of(options.prompts, real, Path(options.data or ""), options.count)
    found = {"extractors": extractors, "real": real if extractors else None, "device": str(device)}

    def check(folder: Path, student: Path) -> Comparison:
        if not options.adapter_rank:
            return compare(folder, teacher, Bundle.open(student), prompts, **found)
        adapters = {str(student): 1.0}
        called = replace(teacher, defaults=adapted_defaults(teacher.defaults, adapters))
        return compare(folder, teacher, called, prompts, adapters=adapters, **found)

    return check


def _runs(
    options: DistillOptions,
    stages: Sequence[str],
    recipe: str,
    teacher: Bundle,
    sigmas: tuple[float, ...],
    guidance_embedding_range: tuple[float, float] | None,
) -> list[StageRun]:
    """Build the run of each stage; `guidance_embedding_range`: range of scales of guidance-distilled students. Raises
    UserError for a stage that could not start; nothing has been trained then."""
    plain = resolve_config(recipe, config_file=options.config_file)
    model, path, guidance = teacher.config, teacher.path, options.guidance or teacher.defaults.guidance
    of_adapter = [] if options.adapter_rank is None else [f"train.adapter.rank={options.adapter_rank}"]
    runs, with_guidance_embedding = [], []
    if guidance_embedding_range is not None:
        guidance, scale = 1.0, embedded_scale(teacher.defaults, guidance_embedding_range)
        with_guidance_embedding = [
            f"model.guidance_embedding_range=[{guidance_embedding_range[0]!r},{guidance_embedding_range[1]!r}]",
            f"validation.sampling.guidance={scale:g}",
        ]
    for number, name in enumerate(stages, start=1):
        folder, of_regression = options.out / f"{number}_{name}", []
        if STAGES[name].is_regression:
            data = options.pairs or options.out / REGRESSION_DATA / DATASET
            of_regression = [*REGRESSION_OVERRIDES, f"data.path={data}"]
        of_all, of_stage = overrides_of(options.overrides, name)
        overrides = [
            *model_overrides(model, plain),
            *with_guidance_embedding,
            f"train.distill.teacher={path}",
            f"train.distill.objective={name}",
            f"train.distill.guidance={guidance:g}",
            *of_adapter,
            f"train.output_dir={folder}",
            *("diffusion.learned_uncertainty=false", "data.text_dropout=0.0", "validation.interval=0"),
            *STAGES[name].overrides(plain, sigmas),
            *([] if options.data is None else [f"data.path={options.data}"]),
            *(*of_all, *of_regression, *of_stage),
        ]
        runs.append(stage_run(folder, recipe, overrides, options))
        config = runs[-1].config
        guidance = 1.0
        if options.adapter_rank is None:
            model, path = config.model, folder / "bundle"
            continue
        refuse(
            config.model != model,
            "an adapter needs the teacher's network as it is: leave out model.* and --guidance_embedding_range",
        )
        of_adapter = [*of_adapter[:1], f"train.distill.teacher_adapter={folder / 'adapter'}"]
    return runs


def _begin_with(student: Path, noise_scale: float) -> None:
    """Change the initial noise scale of a finished student, on which training does not depend."""
    if is_adapter(student):
        adapter = read_adapter(student)
        write_adapter(student, replace(adapter, defaults={**adapter.defaults, "noise_scale": noise_scale}))
    else:
        bundle = Bundle.open(student)
        write_defaults(bundle, replace(bundle.defaults, noise_scale=noise_scale))


if __name__ == "__main__":
    raise SystemExit(main())
