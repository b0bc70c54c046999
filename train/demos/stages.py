"""Stages of a demo: each leaves its result in a folder and is skipped where that is there already."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from megadit.models.megatron.extensions import has_cuda_graphs
from megadit.models.shared.cli.command import cleaning_up, run_module
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path, read_json, write_json
from megadit.models.shared.progress import duration
from megadit.train.config.load import resolve_config
from megadit.train.plan.hardware import Gpu, ranks_that_gain, this_device
from megadit.train.plan.throughput import step_seconds


@dataclass(frozen=True, kw_only=True)
class TrainingDemo:
    """A demo that trains a model on a data set of its own."""

    out: Path
    """Folder for everything."""
    num_ranks: int = 2

    @property
    def dataset(self) -> Path:
        return self.out / "dataset"

    @property
    def training(self) -> Path:
        return self.out / "train"

    @property
    def bundle(self) -> Path:
        return self.out / "bundle"

    @property
    def videos(self) -> Path:
        return self.out / "videos"

    def clips(self, name: str) -> Path:
        return self.out / f"{name.replace(' ', '-')}.safetensors"


Demo = TypeVar("Demo", bound=TrainingDemo)


@dataclass(frozen=True, kw_only=True)
class FollowingDemo(TrainingDemo):
    """A demo that continues from the model of another."""

    base: Path
    """Bundle of the base model, in the folder of its demo."""
    steps: int | None = None
    """Training steps; None: those of the recipe."""
    stride: int = 1
    """Score every `stride`-th of the demo's 432 combinations."""
    seed: int = 1234

    @property
    def training_overrides(self) -> list[str]:
        """Overrides of a recipe for a run that starts from the base model."""
        steps = [] if self.steps is None else [f"train.train_iters={self.steps}"]
        return [f"checkpoint.init_from={self.base}", f"train.seed={self.seed}", *steps]


Following = TypeVar("Following", bound=FollowingDemo)


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowingOptions:
    out: Path | None = setting(None, "folder for everything (default: runs/, and the demo's name)")
    bundle: Path = setting(Path("runs/demo/bundle"), "bundle to start from (default: {default})")
    ranks: int | None = setting(None, "training processes (default: one a GPU or core, two at most)", low=1)
    steps: int | None = setting(None, "training steps (default: those of the recipe)", low=1)
    stride: int = setting(1, "score every N-th of 432 clips (default: {default})", low=1)
    seed: int = setting(1234, "seed of training (default: {default})", low=0)


def following_demo(kind: type[Following], options: FollowingOptions, name: str, **more: Any) -> Following:
    """The demo that the options of `megadit NAME` ask for, with `more` fields of its own. Raises UserError where the
    model that it starts from is not there."""
    check_base(options.bundle)
    return kind(
        out=options.out or Path("runs") / name,
        base=options.bundle,
        num_ranks=options.ranks or ranks_that_gain(),
        steps=options.steps,
        stride=options.stride,
        seed=options.seed,
        **more,
    )


@dataclass(frozen=True, slots=True)
class Stage(Generic[Demo]):
    name: str
    """Name, under which its duration is recorded."""
    purpose: str
    run: Callable[[Demo], None]
    results: Callable[[Demo], Sequence[Path]]
    """Complete once they exist: each is written under a temporary name and renamed."""
    seconds: Callable[[Demo, Gpu], float] | None = None
    """Expected seconds on this machine, whose ranks have such a core; None if unknown."""


def seconds_of(seconds: float, of: Callable[[Demo], int] = lambda demo: 1) -> Callable[[Demo, Gpu], float]:
    """Time of a stage from `seconds` for each of its samples, counted by `of`, on a core with `small_speed` 1."""
    return lambda demo, core: seconds * of(demo) / core.small_speed


def training_stages(
    recipe: str, goal: str, settings: Callable[[Demo], Sequence[str]], *, is_timed: bool = False
) -> tuple[Stage[Demo], Stage[Demo]]:
    """A recipe trained on the demo's data set, with `settings` of its configuration, and the bundle of what it learnt.

    A run that was interrupted goes on where it stopped. `is_timed`: it is known before how long they will take.
    """

    def train(demo: Demo) -> None:
        folders = f"data.path={demo.dataset}", f"train.output_dir={demo.training}"
        ranks = "--nproc", str(demo.num_ranks)
        run_module("megadit.train", "--recipe", recipe, *ranks, *folders, *_settings_of_gpus(), *settings(demo))
        (demo.training / "finished").touch()

    def seconds(demo: Demo, core: Gpu) -> float:
        config = resolve_config(recipe, overrides=[*_settings_of_gpus(), *settings(demo)])
        steps = config.train.train_iters * step_seconds(config, demo.num_ranks, core)
        return 1.1 * steps + 25 / core.small_speed  # validation and checkpoints, then imports

    def gather(demo: Demo) -> None:
        run_module("megadit.train.checkpoints.to_bundle", str(demo.training), str(demo.bundle))

    purpose = f"train the recipe `{recipe}` {goal}"
    parts = "gather network, tokenizer and text encoder in one folder"
    return (
        Stage("train", purpose, train, lambda demo: [demo.training / "finished"], seconds if is_timed else None),
        Stage("bundle", parts, gather, lambda demo: [demo.bundle], seconds_of(8) if is_timed else None),
    )


def _settings_of_gpus() -> tuple[str, ...]:
    """Settings with which a small network trains on GPUs: its kernels take a host longer to launch than a GPU to
    compute, so that blocks are replayed. () where there is no GPU that can."""
    return ("train.precision=bf16", "parallel.cuda_graph_max_segments=128") if has_cuda_graphs() else ()


def run_stages(demo: Demo, stages: Sequence[Stage[Demo]]) -> dict[str, float]:
    """Runs every stage whose results are missing; the seconds that each took in its last run."""
    demo.out.mkdir(parents=True, exist_ok=True)
    file = demo.out / "seconds.json"
    plan = TimePlan(demo, stages)
    print(*plan.beginning(), sep="\n", end="", flush=True)
    with cleaning_up():
        for number, stage in enumerate(stages, start=1):
            heading = f"[{number}/{len(stages)}] {stage.name}: {stage.purpose}"
            if all(path.exists() for path in stage.results(demo)):
                print(f"{heading} -- already done", flush=True)
                continue
            print(heading, flush=True)
            start = time.monotonic()
            stage.run(demo)
            seconds = time.monotonic() - start
            known = read_json(file) if file.exists() else {}
            write_json(file, {**known, stage.name: round(seconds, 1)})
            print(f"      {duration(seconds)}{plan.after(stage.name, seconds)}", flush=True)
    return read_json(file)


class TimePlan:
    """Expected time of the stages that are not done: by this machine's measured speed, corrected by those done."""

    def __init__(self, demo: Demo, stages: Sequence[Stage[Demo]]) -> None:
        known = [stage for stage in stages if stage.seconds is not None]
        open_ = [stage for stage in known if not all(path.exists() for path in stage.results(demo))]
        core = this_device(demo.num_ranks) if open_ else None
        self._left = {stage.name: stage.seconds(demo, core) for stage in open_}
        self._expected = self._taken = 0.0

    def beginning(self) -> list[str]:
        """A line for all of them."""
        if not self._left:
            return []
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in self._left.items())
        return [f"about {duration(sum(self._left.values()))} on this machine, as measured: {parts}", ""]

    def after(self, name: str, seconds: float) -> str:
        """Describe the time left after a stage that took `seconds`, as an addition to a sentence."""
        self._expected += self._left.pop(name, 0.0)
        self._taken += seconds
        left = sum(self._left.values())
        return f"; about {duration(left * self._taken / self._expected)} left" if left and self._expected else ""


def write_blend(path: Path, parts: Sequence[Path], validation: Path) -> None:
    """Write a blend that draws from each data set in turn, and validates on one."""
    even = [{"weight": 1, "path": str(part.resolve())} for part in parts]
    splits = {"train": {"blend": even}, "val": {"path": str(validation.resolve())}}
    blend = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}
    with atomic_path(path) as temporary:
        temporary.write_text(yaml.safe_dump(blend, sort_keys=False), encoding="utf-8")


def check_base(bundle: Path) -> None:
    """Raises UserError where the model that a demo starts from is not there."""
    if not bundle.is_dir():
        raise UserError(f"there is no bundle {bundle}; run `megadit demo` first, or name one with --bundle")


def run_and_show(
    demo: Demo, stages: Sequence[Stage[Demo]], table: Callable[[dict[str, Any]], str], *pictures: Path
) -> None:
    """Runs the stages, and prints the table of their scores, their times, and where to look."""
    seconds = run_stages(demo, stages)
    print(table(read_json(demo.out / "score.json")))
    print(f"{summary_of_seconds(seconds)}\n\nLook at {' and '.join(map(str, pictures))}.")


def summary_of_seconds(seconds: dict[str, float]) -> str:
    """Describe the total time and that of each stage, in a line."""
    times = ", ".join(f"{stage} {duration(value)}" for stage, value in seconds.items())
    return f"in all {duration(sum(seconds.values()))}: {times}"
