"""Sampling quality of a digits bundle: solvers by function evaluations, negative prompts, and guidance at equal cost.

    python -m megadit.train.demos.digits.sampling runs/demo OUT [--clips 96] [--weaker BUNDLE]

`runs/demo` is what `make demo` left. Writes OUT/sampling.json and OUT/score_against_calls.png.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.sampling.samplers import SAMPLERS
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path, write_json
from megadit.models.shared.progress import Progress
from megadit.train.demos.clips import as_float
from megadit.train.demos.digits import classifier, score
from megadit.train.demos.digits.data import COLOURS, Attributes
from megadit.train.monitoring.curves import BACKGROUND, FAINT, GRID, TEXT

CALLS = (4, 6, 8, 12, 20, 35)
"""Function evaluations at which solvers are compared; second-order solvers use at most as many."""
SCALES = (2.0, 4.0)
NEGATIVE_SCALES = (1.5, 2.0, 4.0)
TWO_CALLS = ("heun", "dpm2")
SOLVERS: dict[str, dict[str, Any]] = {name: {"sampler": name, "eta": 0.0} for name in SAMPLERS} | {
    "euler, ancestral": {"sampler": "euler", "eta": 1.0}
}


@dataclass(frozen=True, slots=True)
class Bench:
    """Pipeline, classifier and prompts of a measurement."""

    pipeline: TextToVideo
    reader: classifier.DigitReader
    attributes: list[Attributes]
    captions: list[str]

    def clips(self, captions: Sequence[str], **settings: Any) -> Tensor:
        """BCTHW in [-1, 1], one clip of each caption."""
        results = self.pipeline(captions, seeds=list(range(len(captions))), **settings)
        videos = torch.stack([torch.from_numpy(result.video) for result in results])
        return as_float(videos.permute(0, 4, 1, 2, 3))

    def share_right(self, **settings: Any) -> dict[str, float]:
        """Shares of frames and clips that show what their caption says; `score.score`."""
        return score.score(self.reader, self.clips(self.captions, **settings), self.attributes)


def solvers(bench: Bench, bar: Progress) -> dict[str, list[dict[str, float]]]:
    """Score of each solver at each number of function evaluations."""
    result: dict[str, list[dict[str, float]]] = {}
    for name, settings in SOLVERS.items():
        for calls in CALLS:
            num_steps = (calls + 1) // 2 if name in TWO_CALLS else calls
            made = 2 * num_steps - 1 if name in TWO_CALLS else num_steps
            right = bench.share_right(num_steps=num_steps, **settings)
            result.setdefault(name, []).append({"calls": made, **right})
            bar.advance(1, solver=name, right=right["all"])
    return result


def negative_prompt(bench: Bench, count: int) -> dict[str, Any]:
    """Shares of red clips, and of those of any colour with a name, among clips of no prompt at all.

    Plain, and with "red" as negative prompt at several scales: too large a one drives all colours away.
    """
    red = list(COLOURS).index("red")

    def shares(**settings: Any) -> dict[str, float]:
        colour_BT = classifier.classify(bench.reader, bench.clips([""] * count, **settings)).colour_BT
        matches = {"red": colour_BT == red, "coloured": colour_BT != classifier.NONE}
        return {name: (is_BT.float().mean(1) > 0.5).float().mean().item() for name, is_BT in matches.items()}

    negative = [{"scale": scale, **shares(negative_prompt="red", guidance=scale)} for scale in NEGATIVE_SCALES]
    return {"clips": count, "plain": shares(guidance=1.0), "red_as_negative": negative}


def guidance(bench: Bench, weaker: str | None, bar: Progress) -> list[dict[str, Any]]:
    """Kinds of guidance at equal cost: function evaluations of one video, of which guidance takes two a step.

    Guidance in an interval needs one outside of it, and can use more steps.
    """
    kinds: dict[str, dict[str, Any]] = {
        "plain": {"num_steps": 10},
        "interval 0.3 to 10": {"num_steps": 14, "guidance_interval": (0.3, 10.0)},
        "rescale 0.7": {"num_steps": 10, "guidance_rescale": 0.7},
    }
    if weaker is not None:
        kinds["autoguidance"] = {"num_steps": 10, "autoguidance": weaker}
    rows = []
    for scale in SCALES:
        for name, settings in kinds.items():
            function_evaluations = _function_evaluations(bench, settings)
            right = bench.share_right(sampler="euler", guidance=scale, **settings)
            rows.append({"guidance": name, "scale": scale, "function_evaluations": function_evaluations, **right})
            bar.advance(1, right=right["all"])
    return rows


def _function_evaluations(bench: Bench, settings: dict[str, Any]) -> int:
    """Function evaluations of one video with guidance, counted as rows of the network's batches."""
    count, denoiser = 0, bench.pipeline.denoiser

    def counting(x, sigma_B, conditioning):
        nonlocal count
        count += len(x)
        return denoiser(x, sigma_B, conditioning)

    bench.pipeline.denoiser = counting
    try:
        bench.pipeline(bench.captions[:1], sampler="euler", guidance=2.0, **settings)
    finally:
        bench.pipeline.denoiser = denoiser
    # the weaker network's pass has the same size
    return count + (settings["num_steps"] if "autoguidance" in settings else 0)


def draw(path: Path, result: dict[str, list[dict[str, float]]]) -> None:
    """Score against denoiser calls, a line for each solver."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), facecolor=BACKGROUND)
    axis = figure.subplots()
    axis.set_facecolor(BACKGROUND)
    for name, points in result.items():
        axis.plot([point["calls"] for point in points], [point["all"] for point in points], marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(CALLS, [str(calls) for calls in CALLS])
    axis.set_xlabel("denoiser calls", color=TEXT)
    axis.set_ylabel("clips with digit, colour and direction right", color=TEXT)
    axis.tick_params(colors=FAINT)
    axis.grid(color=GRID)
    axis.legend(facecolor=BACKGROUND, labelcolor=TEXT)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110, facecolor=BACKGROUND)


def load_bench(demo: Path, count: int) -> Bench:
    """The bundle, the classifier and `count` scored captions, spread over all of them. Raises UserError if `demo` is
    not what `make demo` leaves."""
    weights = demo / classifier.FILE
    if not weights.exists():
        raise UserError(
            f"{weights} does not exist: give the folder that `make demo` left, once it has scored its clips"
        )
    seen, _ = score.scored_attributes()
    if not 1 <= count <= len(seen):
        raise UserError(f"--clips {count} must lie between 1 and {len(seen)}")
    chosen = torch.randperm(len(seen), generator=torch.Generator().manual_seed(0))[:count].tolist()
    attributes = [seen[place] for place in chosen]
    pipeline = TextToVideo.from_pretrained(demo / "bundle", device="cpu")
    return Bench(pipeline, classifier.load_reader(weights), attributes, score.heldout_captions(attributes))


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    demo: Path = setting(help="the folder that `make demo` left", positional=True)
    out: Path = setting(help="folder for sampling.json and score_against_calls.png", positional=True)
    clips: int = setting(96, "clips of each measurement (default: {default})", low=1)
    weaker: str | None = setting(None, "bundle of a weaker checkpoint, for autoguidance")


@command(SamplingOptions, prog="python -m megadit.train.demos.digits.sampling", description=__doc__.splitlines()[0])
def main(options: SamplingOptions) -> None:
    bench = load_bench(options.demo, options.clips)
    num_kinds = 4 if options.weaker else 3
    with Progress(len(SOLVERS) * len(CALLS) + num_kinds * len(SCALES), "sampling") as bar:
        result = {
            "clips": options.clips,
            "negative_prompt": negative_prompt(bench, 2 * options.clips),
            "guidance": guidance(bench, options.weaker, bar),
            "solvers": solvers(bench, bar),
        }
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "sampling.json", result)
    draw(options.out / "score_against_calls.png", result["solvers"])
    print(options.out / "sampling.json")


if __name__ == "__main__":
    raise SystemExit(main())
