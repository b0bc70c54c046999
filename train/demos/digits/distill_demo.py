"""`megadit demo-distill`: students of the demo's model that sample in four, two, or one step.

megadit demo-distill              # from the bundle of `megadit demo`, into runs/demo-distill
megadit demo-distill --bundle runs/demo-conditioning/bundle --out runs/distill-image    # a student of first frames

A model with conditioning frames gets only the student of four steps: the others learn from pairs of noise and clip,
which have no conditioning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megadit.infer.evaluate.extractors import open_extractors
from megadit.infer.evaluate.metrics.distances import frechet, moments
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.sampling.resolve import num_function_evaluations, resolve_settings
from megadit.models.bundle import Bundle
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.cli.command import run_module
from megadit.models.shared.cli.options import command
from megadit.models.shared.files import read_json, write_json
from megadit.train.demos import contact_sheets
from megadit.train.demos.clips import as_float, as_uint8, make_clips, read_clips
from megadit.train.demos.digits import classifier as classifier_file
from megadit.train.demos.digits import conditioning_score, score
from megadit.train.demos.digits.data import Attributes
from megadit.train.demos.stages import FollowingDemo, FollowingOptions, Stage, following_demo, run_and_show
from megadit.train.distill.check import spread, spread_within

TEACHER = "teacher"
TWENTY_STEPS = {"sampler": "euler", "num_steps": 10, "eta": 1.0}
"""Sampler of the teacher, with guidance, whatever its bundle's defaults are."""
REGRESSION_MICRO_BATCH = 8
"""Pairs per training step where --steps asks for few, so that making them is not most of the time."""
TWICE = 3
"""Stride of the scored captions with two clips each, whose difference is the diversity."""
SHOWN = 6
"""Number of prompts in the picture."""
FOUR_SIGMAS = ("12", "4", "1.5", "0.5")
"""Noise levels of the guidance-distilled student: starting from 80, where its output is a mean, would reduce the
diversity of a prompt's clips."""
NOISE_SCALE = 0.8
"""Initial noise scale of students of the teacher's ODE: at 1, clips of a prompt are more diverse than the teacher's."""


@dataclass(frozen=True, kw_only=True)
class DistillDemo(FollowingDemo):
    """The folders of this demo."""

    def student(self, calls: int) -> Path:
        return self.out / f"calls{calls}"

    @cached_property
    def has_first_frame(self) -> bool:
        return "first_frame" in Bundle.open(self.base).conditionings

    @property
    def calls(self) -> tuple[int, ...]:
        """Function evaluations of each student."""
        return (4,) if self.has_first_frame else (4, 2, 1)

    @property
    def models(self) -> dict[str, Path]:
        """Name -> bundle."""
        return {TEACHER: self.base} | {name_of(calls): self.student(calls) / "bundle" for calls in self.calls}

    def settings(self, name: str) -> SamplingSettings:
        """Sampling settings of a model."""
        defaults = Bundle.open(self.models[name]).defaults
        return resolve_settings(defaults, **TWENTY_STEPS) if name == TEACHER else defaults

    @cached_property
    def classifier_file(self) -> Path:
        return classifier_file.classifier_file(self.base, self.out, Bundle.open(self.base).load_tokenizer())

    @property
    def seen(self) -> list[Attributes]:
        return score.scored_attributes()[0][:: self.stride]

    @property
    def unseen(self) -> list[Attributes]:
        return score.scored_attributes()[1][:: self.stride]


def name_of(calls: int) -> str:
    """Name of a student."""
    return f"{calls} call{'s' * (calls > 1)}"


# --- stages -------------------------------------------------------------------------------------------------------


def _distill(demo: DistillDemo, calls: int) -> None:
    if calls == 4:
        stage, more = "guidance", ["--sigmas", *FOUR_SIGMAS]
    else:
        stage = "regression"
        more = [f"checkpoint.init_from={demo.student(4) / 'bundle'}", "--noise_scale", str(NOISE_SCALE)]
        more += [] if demo.steps is None else ["--num_trajectories", str(REGRESSION_MICRO_BATCH * demo.steps)]
        more += ["--pairs", str(demo.student(2) / "pairs" / "dataset")] if calls == 1 else []
    steps = [] if demo.steps is None else [f"train.train_iters={demo.steps}"]
    recipe, own = ("digits_conditioned", []) if demo.has_first_frame else ("digits", ["data.keep=[image:0.1]"])
    overrides = [*own, f"train.seed={demo.seed}", *steps, *more]
    run_module(
        "megadit.train.distill.command",
        *(str(demo.base), str(demo.student(calls)), *overrides, "--data", str(demo.base.parent / "dataset")),
        *("--stages", stage, "--calls", str(calls), "--recipe", recipe, "--nproc", str(demo.num_ranks)),
        *("--extractors", str(demo.classifier_file)),
    )


def _generate(demo: DistillDemo) -> None:
    """Every scored clip by every model, then a second one of some captions; uint8 BCTHW."""
    captions = score.heldout_captions(demo.seen + demo.unseen)
    prompts = [*captions, *captions[: len(demo.seen) : TWICE]]
    for name, bundle in demo.models.items():
        make_clips(demo.clips(name), bundle, prompts, **demo.settings(name).to_dict())


def _score(demo: DistillDemo) -> None:
    extractors = open_extractors(demo.classifier_file, torch.device("cpu"))
    reader, seer = extractors[0].reader, next(each for each in extractors if each.sees == "clips")
    round_trip = classifier_file.round_trip(Bundle.open(demo.base).load_tokenizer())
    real = _features(seer, as_uint8(round_trip(score.real_clips(demo.seen))))
    found, count, digit_N = {}, len(demo.seen), torch.tensor([each.digit for each in demo.seen])
    of_real = spread_within(real[:, None], digit_N)
    for name, bundle in demo.models.items():
        video_BCTHW = load_file(demo.clips(name))["video_BCTHW"]
        first, unseen, second = video_BCTHW.split([count, len(demo.unseen), len(range(0, count, TWICE))])
        made, again = _features(seer, first), _features(seer, second)
        found[name] = {
            "function_evaluations": num_function_evaluations(demo.settings(name), Bundle.open(bundle).config),
            "seen": score.score(reader, as_float(first), demo.seen),
            "unseen": score.score(reader, as_float(unseen), demo.unseen),
            "distance": frechet(moments(made[:, None]), moments(real[:, None])),
            "spread": spread(torch.cat([made[::TWICE], again])[:, None]),
            "spread_of_a_digit": spread_within(made[:, None], digit_N) / of_real if of_real else None,
            **_first_frame_scores(demo, name, reader),
        }
    write_json(demo.out / "score.json", found)


def _first_frame_scores(demo: DistillDemo, name: str, reader: classifier_file.DigitReader) -> dict[str, Any]:
    """Score a model with first-frame conditioning, if the teacher supports it."""
    if not demo.has_first_frame:
        return {}
    pipeline, settings = TextToVideo.from_pretrained(demo.models[name], device="cpu"), demo.settings(name).to_dict()
    real = score.real_clips(demo.seen)
    return {"first_frame": conditioning_score.first_frame(pipeline, reader, demo.seen, real, **settings)}


def _features(seer: Any, video_BCTHW: Tensor) -> Tensor:
    """Float32 [B, D]."""
    return torch.cat([seer(part.permute(0, 2, 3, 4, 1)) for part in video_BCTHW.split(64)])


def _draw(demo: DistillDemo) -> None:
    """Draw clips of the same prompts and noise, a column for each model."""
    found, chosen = read_json(demo.out / "score.json"), contact_sheets.spread(range(len(demo.seen)), SHOWN)
    captions, rows = score.heldout_captions(demo.seen), []
    for name in demo.models:
        video_BCTHW = read_clips(demo.clips(name))
        count = found[name]["function_evaluations"]
        note = f"{count} evaluation{'s' * (count > 1)}"
        rows += [contact_sheets.SheetRow(captions[place], video_BCTHW[place], note=note) for place in chosen]
    title = f"the same prompts and noise: the teacher, and students of {', '.join(map(name_of, demo.calls))}"
    contact_sheets.contact_sheet(demo.out / "distilled.png", rows, title=title, columns=len(demo.models))


def _student_stage(calls: int, purpose: str) -> Stage[DistillDemo]:
    return Stage(
        name_of(calls), purpose, lambda demo: _distill(demo, calls), lambda demo: [demo.student(calls) / "bundle"]
    )


STUDENTS: dict[int, Stage[DistillDemo]] = {
    4: _student_stage(4, "teach a student to answer what its guided teacher answers"),
    2: _student_stage(2, "teach one whole clips in two calls, of what the teacher makes of noise"),
    1: _student_stage(1, "and in one"),
}
"""Stages of students, by their number of calls."""
SCORED: Sequence[Stage[DistillDemo]] = (
    Stage("generate", "make clips of held-out captions", _generate, lambda demo: [demo.clips(list(demo.models)[-1])]),
    Stage(
        "score", "classify every frame, and how various the clips are", _score, lambda demo: [demo.out / "score.json"]
    ),
    Stage("figures", "draw the same prompts by all of them", _draw, lambda demo: [demo.out / "distilled.png"]),
)


# --- the command --------------------------------------------------------------------------------------------------


@command(
    FollowingOptions,
    prog="megadit demo-distill",
    description="Trains students of the demo's model that sample in four, two, or one step.",
)
def main(options: FollowingOptions) -> None:
    """Runs `megadit demo-distill`; returns its exit code."""
    demo = following_demo(DistillDemo, options, "demo-distill")
    stages = [*(STUDENTS[calls] for calls in demo.calls), *SCORED]
    run_and_show(demo, stages, summary_table, demo.out / "distilled.png")
    print(
        f"Make your own: megadit generate --checkpoint_path {demo.student(4) / 'bundle'} "
        '--prompt "a red seven moving left"'
    )


def summary_table(found: dict[str, Any]) -> str:
    """One line for each model; the distance, and the spread of a caption's clips, as multiples of the teacher's, and
    that of a digit's as one of real clips'."""
    shares = f"{'all':>8}{'every':>8}{'unseen':>8}{'every':>8}"
    lines = [f"{'':12}{'evaluations':>12}{shares}{'distance':>10}{'spread':>8}{'of a digit':>12}"]
    if "first_frame" in found[TEACHER]:
        lines[0] += f"   {'first frame: digit':>18}{'every':>8}"
    of_teacher = found[TEACHER]
    for name, values in found.items():
        shares = [values[part][share] for part in ("seen", "unseen") for share in ("all", "every_frame")]
        compared = [values[figure] / of_teacher[figure] for figure in ("distance", "spread")]
        of_digit = values.get("spread_of_a_digit")
        of_digit = "-" if of_digit is None else f"{of_digit:.2f}"
        compared = f"{compared[0]:10.2f}{compared[1]:8.2f}{of_digit:>12}"
        numbers = "".join(f"{share:8.1%}" for share in shares) + compared
        if "first_frame" in values:
            numbers += f"   {values['first_frame']['digit']:18.1%}{values['first_frame']['every_frame']:8.1%}"
        lines.append(f"{name:12}{values['function_evaluations']:12}{numbers}")
    return "\n".join(lines)
