"""`megadit demo`: from handwritten digits to videos made from prompts, in minutes, without a GPU.

    megadit demo                        # everything under runs/demo
    megadit demo --quick --out DIR  # the same stages with next to no training

Each stage leaves its result in the folder and is skipped where that result is there already: an interrupted demo
continues where it stopped, the training in the middle of it included.
"""

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from megadit.models.bundle import Bundle
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.files import atomic_directory, read_json, write_json
from megadit.models.tokenizers import load_tokenizer
from megadit.train.data.prepare.drawn import prepare_drawn
from megadit.train.demos import contact_sheets
from megadit.train.demos.clips import make_clips, read_clips, write_clips
from megadit.train.demos.digits import classifier, score
from megadit.train.demos.digits.data import FPS, Attributes
from megadit.train.demos.digits.evaluation import ALL_GUIDANCES, evaluate_bundle
from megadit.train.demos.digits.samples import DIGITS
from megadit.train.demos.stages import Stage, TrainingDemo, run_stages, seconds_of, summary_of_seconds, training_stages
from megadit.train.monitoring.curves import MetricsFile, training_curves
from megadit.train.plan.hardware import ranks_that_gain

MP4_ZOOM = 8
"""Each pixel of a clip becomes a square of this side in its mp4: 32 pixels are too few to watch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSize:
    """Sizes of the data, training and evaluation."""

    num_clips: int
    num_images: int
    num_val: int
    overrides: tuple[str, ...] = ()
    """Changes of the recipe `digits`."""
    clip_stride: int = 1
    """Generate and score every so-manyth clip."""


FULL = DemoSize(num_clips=DIGITS.num_clips, num_images=DIGITS.num_images, num_val=DIGITS.num_val)
QUICK = DemoSize(
    num_clips=200,
    num_images=400,
    num_val=50,
    overrides=(
        "train.train_iters=20",
        "train.log_interval=5",
        "checkpoint.save_interval=10",
        "validation.interval=20",
        "validation.num_batches=1",
        "optimizer.lr_warmup_iters=5",
    ),
    clip_stride=16,
)


@dataclass(frozen=True, kw_only=True)
class Demo(TrainingDemo):
    """The folder of this demo and what goes into it."""

    size: DemoSize
    guidances: tuple[float, ...] = ()
    """Guidance scales at which clips are evaluated besides the model's own."""

    @property
    def generated(self) -> Path:
        return self.out / "generated.safetensors"

    @property
    def evaluation(self) -> Path:
        return self.out / "evaluation"

    @property
    def attributes(self) -> tuple[list[Attributes], list[Attributes]]:
        """Attributes in the captions of the scored clips: combinations in the training set, and ones that are not."""
        seen, unseen = score.scored_attributes()
        return seen[:: self.size.clip_stride], unseen[:: self.size.clip_stride]


# --- stages -------------------------------------------------------------------------------------------------------


def _prepare(demo: Demo) -> None:
    size = demo.size
    prepare_drawn(DIGITS, demo.dataset, num_clips=size.num_clips, num_images=size.num_images, num_val=size.num_val)


def _generate(demo: Demo) -> None:
    """Every scored clip; those training saw come first."""
    seen, unseen = demo.attributes
    make_clips(demo.generated, demo.bundle, score.heldout_captions(seen + unseen))


def _write_videos(demo: Demo) -> None:
    """The clips of the contact sheet."""
    clips, _, captions = _showcase(demo)
    with atomic_directory(demo.videos) as folder:
        write_clips(folder, clips, captions, fps=FPS, zoom=MP4_ZOOM)


def _score(demo: Demo) -> None:
    tokenizer = load_tokenizer(demo.dataset / "tokenizer")
    round_trip = classifier.round_trip(tokenizer)
    reader = classifier.load_or_train_reader(demo.out / classifier.FILE, round_trip, tokenizer.fingerprint())
    score.write_scorer(demo.out / score.SCORER_DIR, demo.out / classifier.FILE)
    seen, unseen = demo.attributes
    clips = read_clips(demo.generated)
    result = score.score(reader, clips[: len(seen)], seen)
    result["unseen_combinations"] = score.score(reader, clips[len(seen) :], unseen)
    result["real"] = score.score(reader, score.real_clips(seen), seen)
    result["real_decoded"] = score.score(reader, round_trip(score.real_clips(seen)), seen)
    write_json(demo.out / "score.json", {**result, "sampling": Bundle.open(demo.bundle).defaults.to_dict()})


def _evaluate(demo: Demo) -> None:
    seen, _ = demo.attributes
    clips = load_file(demo.generated)["video_BCTHW"][: len(seen)]
    evaluate_bundle(demo.evaluation, Bundle.open(demo.bundle), demo.out / classifier.FILE, clips, seen, demo.guidances)


def _draw_plots(demo: Demo) -> None:
    clips, attributes, captions = _showcase(demo)
    reader = classifier.load_reader(demo.out / classifier.FILE)
    verdicts = score.frames_and_clips_right(classifier.classify(reader, clips), attributes)
    unseen = {a.combination for a in demo.attributes[1]}
    rows = [
        contact_sheets.SheetRow(
            caption,
            clip_CTHW,
            {name: verdicts[name][i].float().mean().item() > 0.5 for name in ("digit", "colour", "direction")},
            note="unseen" if attributes[i].combination in unseen else "",
        )
        for i, (caption, clip_CTHW) in enumerate(zip(captions, clips, strict=True))
    ]
    result = read_json(demo.out / "score.json")
    title = (
        f"{result['all']:.0%} of {result['num_clips']} clips show digit, colour and direction of their caption; "
        f"{result['unseen_combinations']['all']:.0%} where training never saw the three together (unseen)"
    )
    contact_sheets.contact_sheet(demo.out / "contact_sheet.png", rows, title=title)
    records = MetricsFile(demo.training / "metrics.jsonl").read()
    training_curves(demo.out / "curves.png", records, title="training on handwritten digits")


def _clips(demo: Demo) -> int:
    return sum(map(len, demo.attributes))


STAGES = (
    Stage(
        "prepare",
        "draw captioned clips and write them as shards",
        _prepare,
        lambda demo: [demo.dataset],
        seconds_of(1.1e-3, of=lambda demo: demo.size.num_clips + demo.size.num_images),
    ),
    *training_stages("digits", "on Megatron-core", lambda demo: demo.size.overrides, is_timed=True),
    Stage(
        "generate",
        "make a clip of each held-out caption",
        _generate,
        lambda demo: [demo.generated],
        seconds_of(0.01, of=_clips),
    ),
    Stage("videos", "write mp4 files", _write_videos, lambda demo: [demo.videos], seconds_of(3)),
    Stage("score", "classify every frame", _score, lambda demo: [demo.out / "score.json"], seconds_of(16)),
    Stage(
        "evaluate",
        "measure distances from real clips",
        _evaluate,
        lambda demo: [demo.evaluation / "report.json"],
        seconds_of(0.02, of=lambda demo: _clips(demo) * (1 + len(demo.guidances))),
    ),
    Stage(
        "figures",
        "draw the contact sheet and the curves",
        _draw_plots,
        lambda demo: [demo.out / "contact_sheet.png", demo.out / "curves.png"],
        seconds_of(4),
    ),
)


# --- what stages share --------------------------------------------------------------------------------------------


def _showcase(demo: Demo) -> tuple[Tensor, list[Attributes], list[str]]:
    """Up to 24 clips to look at, evenly spread over those that are scored: 18 seen combinations, 6 unseen."""
    seen, unseen = demo.attributes
    chosen = [
        *contact_sheets.spread(range(len(seen)), 18),
        *contact_sheets.spread(range(len(seen), len(seen) + len(unseen)), 6),
    ]
    attributes, captions = seen + unseen, score.heldout_captions(seen + unseen)
    return read_clips(demo.generated)[chosen], [attributes[i] for i in chosen], [captions[i] for i in chosen]


# --- the command --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    out: Path = setting(Path("runs/demo"), "folder for everything (default: {default})")
    ranks: int | None = setting(None, "training processes (default: one a GPU or core, two at most)", low=1)
    quick: bool = setting(False, "test every stage with hardly any training")
    all_guidances: bool = setting(False, "evaluate at guidance 1, 2 and 8 as well: a minute more")


@command(
    DemoOptions,
    prog="megadit demo",
    description="Prepares handwritten digits, trains on them, makes videos from prompts and scores them.",
)
def main(options: DemoOptions) -> int:
    """Runs `megadit demo`; returns its exit code."""
    size, ranks = QUICK if options.quick else FULL, options.ranks or ranks_that_gain()
    more = {"guidances": ALL_GUIDANCES} if options.all_guidances else {}
    run_demo(Demo(out=options.out, size=size, num_ranks=ranks, **more))
    return 0


def run_demo(demo: Demo) -> None:
    """Run every stage whose results are missing, and print the time of each."""
    seconds = run_stages(demo, STAGES)
    result = {**read_json(demo.out / "score.json"), "seconds": seconds}
    write_json(demo.out / "score.json", result)
    print(summary_table(result))
    print(
        f"\nLook at {demo.out / 'contact_sheet.png'}, {demo.videos / 'all.mp4'}, {demo.out / 'curves.png'} and "
        f"{demo.evaluation / 'report.html'}."
    )
    print(f'Make your own: megadit generate --checkpoint_path {demo.bundle} --prompt "a red seven moving left"')


def summary_table(result: dict) -> str:
    """The score as a table of plain text, one row for each kind of clip."""
    names = ("digit", "colour", "direction", "all", "every_frame")
    kinds = {
        "held-out captions": result,
        "unseen combinations": result["unseen_combinations"],
        "real clips": result["real"],
    }
    lines = [f"{'':22}{'clips':>7}" + "".join(f"{name.replace('_', ' '):>13}" for name in names)]
    for kind, values in kinds.items():
        lines.append(f"{kind:22}{values['num_clips']:>7}" + "".join(f"{values[name]:>13.1%}" for name in names))
    return "\n".join([*lines, summary_of_seconds(result["seconds"])])
