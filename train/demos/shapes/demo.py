"""`megadit demo-shapes`: a model of scenes in which things move, turn, grow and change colour, in minutes on a CPU.

    megadit demo-shapes                     # everything under runs/demo-shapes
    megadit demo-shapes --quick --out DIR   # the same stages with next to no training

One model generates scenes from captions, continues first frames, edits clips (video-to-video), and learns a new subject
from ten clips with an adapter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megadit.infer.conditioning.items import ConditioningItem
from megadit.infer.media.video_io import write_video
from megadit.models.bundle import Bundle
from megadit.models.shared.cli.command import run_module
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.files import atomic_directory, read_json, write_json
from megadit.train.data.prepare.drawn import prepare_drawn
from megadit.train.demos import contact_sheets
from megadit.train.demos.clips import make_clips, pixels, read_clips, wall, watchable, write_clips
from megadit.train.demos.digits.classifier import round_trip
from megadit.train.demos.shapes import edits, score, subject
from megadit.train.demos.shapes.classifier import classify
from megadit.train.demos.shapes.data import FPS, Scene, draw_scenes, neutral_caption
from megadit.train.demos.shapes.samples import SHAPES
from megadit.train.demos.stages import Stage, TrainingDemo, run_and_show, training_stages, write_blend
from megadit.train.plan.hardware import ranks_that_gain

SHOWN = {"single": 6, "pair": 12, "single_unseen": 3, "pair_unseen": 3}
"""Clips of each kind in the pictures."""
ZOOM = 4
NUM_EDITS = 9
"""Rows of the other two pictures."""
SHEETS = "contact_sheet.png", "edited.png", "adapter.png"
Item = TypeVar("Item")
ScoreOf = Callable[[Tensor, Sequence[Scene]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Sizes of the data, training and evaluation."""

    num_clips: int = SHAPES.num_clips
    num_images: int = SHAPES.num_images
    num_val: int = SHAPES.num_val
    num_scored: int = 200
    """Captions of each kind."""
    overrides: tuple[str, ...] = ()
    """Changes of the recipe `shapes`."""
    adapter_overrides: tuple[str, ...] = ()
    """Changes of the recipe `shapes_dreambooth`."""


QUICK = Size(
    num_clips=60,
    num_images=60,
    num_val=10,
    num_scored=6,
    overrides=("train.train_iters=4", "checkpoint.save_interval=4", "optimizer.lr_warmup_iters=1"),
    adapter_overrides=("train.train_iters=2", "optimizer.lr_warmup_iters=1"),
)


@dataclass(frozen=True, kw_only=True)
class ShapesDemo(TrainingDemo):
    """The folder of this demo and what goes into it."""

    size: Size = Size()

    @property
    def scenes(self) -> dict[str, list[Scene]]:
        """Scenes of the scored clips, by kind."""
        return score.scored_scenes(self.size.num_scored)

    @property
    def edited(self) -> dict[str, list[tuple[Scene, Scene]]]:
        """Kind of change -> scenes before and after it."""
        return edits.edits([*self.scenes["single"], *self.scenes["pair"]])

    @property
    def taught(self) -> dict[str, list[Scene]]:
        """Scenes for the adapter: its subject, and some that the model knew before."""
        return {**subject.asked(), "single": self.scenes["single"]}

    @property
    def subject(self) -> Path:
        return self.out / "subject"

    @property
    def adapter(self) -> Path:
        return self.out / "adapter"


# --- stages -------------------------------------------------------------------------------------------------------


def _prepare(demo: ShapesDemo) -> None:
    size = demo.size
    prepare_drawn(SHAPES, demo.dataset, num_clips=size.num_clips, num_images=size.num_images, num_val=size.num_val)


def _generate(demo: ShapesDemo) -> None:
    make_clips(demo.clips("text"), demo.bundle, [caption for _, caption in _asked(demo)])


def _continue(demo: ShapesDemo) -> None:
    """Generate clips from first frames of real ones, and captions that name neither things nor colours."""
    scenes = _all(demo.scenes)
    frames = pixels(real_clips(scenes)[:, :, :1])
    conditioning = [ConditioningItem(frames=frame, kind="first_frame") for frame in frames]
    make_clips(demo.clips("first_frame"), demo.bundle, neutral_captions(scenes), conditioning)


def _edit(demo: ShapesDemo) -> None:
    """Edit real clips by other captions (video-to-video)."""
    before, after = zip(*_all(demo.edited), strict=True)
    conditioning = [ConditioningItem(frames=clip, strength=edits.STRENGTH) for clip in pixels(real_clips(before))]
    levels = {"sigmas": edits.SIGMAS, "num_steps": len(edits.SIGMAS)}
    captions = [edits.full_caption(scene) for scene in after]
    make_clips(demo.clips("edited"), demo.bundle, captions, conditioning, **levels)


def _teach(demo: ShapesDemo) -> None:
    """Train the adapter on the ten clips and the data set, so that its contents are preserved."""
    subject.write_subject(demo.subject, Bundle.open(demo.bundle))
    blend, run = demo.out / "with-subject.yaml", demo.out / "adapter-run"
    write_blend(blend, [demo.subject, demo.dataset], demo.subject)
    run_module(
        *("megadit.train", "--recipe", "shapes_dreambooth", "--nproc", str(demo.num_ranks)),
        *(f"data.path={blend}", f"checkpoint.init_from={demo.bundle}", f"train.output_dir={run}"),
        *demo.size.adapter_overrides,
    )
    run_module("megadit.train.checkpoints.to_bundle", str(run), str(demo.adapter))


def _print_next_steps(demo: ShapesDemo) -> None:
    captions = score.scored_captions(_all(demo.taught))
    for name, adapters in (("adapter", {str(demo.adapter): 1.0}), ("no_adapter", {})):
        make_clips(demo.clips(name), demo.bundle, captions, adapters=adapters)


def _score(demo: ShapesDemo) -> None:
    asked = demo.scenes
    result = {name: _by_kind(asked, read_clips(demo.clips(name))) for name in ("text", "first_frame")}
    after = {change: [scene for _, scene in pairs] for change, pairs in demo.edited.items()}
    result["edited"] = _by_kind(after, read_clips(demo.clips("edited")), edits.score_edits)
    for name in ("adapter", "no_adapter"):
        result[name] = _by_kind(demo.taught, read_clips(demo.clips(name)))
    shown = {**asked, **subject.asked()}
    real, decoded = real_clips(_all(shown)), round_trip(Bundle.open(demo.bundle).load_tokenizer())
    result["real"], result["real_decoded"] = (_by_kind(shown, clips) for clips in (real, decoded(real).clamp(-1, 1)))
    write_json(demo.out / "score.json", {**result, "sampling": Bundle.open(demo.bundle).defaults.to_dict()})


def _draw(demo: ShapesDemo) -> None:
    """The contact sheet, and each of its clips as a video."""
    asked, clips, found = _asked(demo), read_clips(demo.clips("text")), read_json(demo.out / "score.json")["text"]
    chosen = _showcase(demo)
    with atomic_directory(demo.videos) as folder:
        write_clips(folder, clips[chosen], [asked[place][1] for place in chosen], fps=FPS, zoom=ZOOM)
        write_video(folder / "all.gif", watchable(wall(clips[chosen]), ZOOM // 2, loops=1), FPS)
    kinds = {"single": "captions of one thing", "pair": "of two", "pair_unseen": "of two never seen together"}
    shares = [f"{found[kind]['all']:.0%} of {found[kind]['num_clips']} {name}" for kind, name in kinds.items()]
    rows = [_row(*asked[place], clips[place]) for place in chosen]
    contact_sheets.contact_sheet(demo.out / "contact_sheet.png", rows, title=f"shown as told: {', '.join(shares)}")
    _draw_edits(demo)
    _draw_subject(demo)


def _draw_edits(demo: ShapesDemo) -> None:
    """Draw the conditioning on the left and the result on the right."""
    found, pairs = read_json(demo.out / "score.json")["edited"], _all(demo.edited)
    chosen, clips = contact_sheets.spread(range(len(pairs)), NUM_EDITS), read_clips(demo.clips("edited"))
    before = real_clips([pairs[place][0] for place in chosen])
    conditioning = [contact_sheets.SheetRow("conditioning", clip) for clip in before]
    made = [_row(pairs[place][1], edits.full_caption(pairs[place][1]), clips[place]) for place in chosen]
    shares = ", ".join(f"{values['all']:.0%} where the {change} changes" for change, values in found.items())
    contact_sheets.contact_sheet(demo.out / "edited.png", [*conditioning, *made], title=f"edited as told: {shares}")


def _draw_subject(demo: ShapesDemo) -> None:
    """Left without the adapter, right with it."""
    found, scenes = read_json(demo.out / "score.json"), _all(demo.taught)
    captions = score.scored_captions(scenes)
    chosen = [*contact_sheets.spread(range(len(scenes) - demo.size.num_scored), NUM_EDITS - 1), len(scenes) - 1]
    rows = [
        _row(scenes[place], captions[place], read_clips(demo.clips(name))[place])
        for name in ("no_adapter", "adapter")
        for place in chosen
    ]
    share, before = (found[name]["subject"]["all"] for name in ("adapter", "no_adapter"))
    title = f"learnt from ten clips: {share:.0%} as told in colours and actions that they lack ({before:.0%} before)"
    contact_sheets.contact_sheet(demo.out / "adapter.png", rows, title=title)


STAGES: Sequence[Stage[ShapesDemo]] = (
    Stage("prepare", "draw captioned scenes and write them as shards", _prepare, lambda demo: [demo.dataset]),
    *training_stages("shapes", "on Megatron-core", lambda demo: demo.size.overrides),
    Stage("generate", "make a clip of each caption", _generate, lambda demo: [demo.clips("text")]),
    Stage("continue", "go on from first frames", _continue, lambda demo: [demo.clips("first_frame")]),
    Stage("edit", "change what clips show", _edit, lambda demo: [demo.clips("edited")]),
    Stage("teach", "train an adapter on ten clips of another thing", _teach, lambda demo: [demo.adapter]),
    Stage(
        "use", "make clips with it", _print_next_steps, lambda demo: [demo.clips("adapter"), demo.clips("no_adapter")]
    ),
    Stage("score", "classify every clip", _score, lambda demo: [demo.out / "score.json"]),
    Stage(
        "figures", "draw the contact sheets and write videos", _draw, lambda demo: [demo.out / name for name in SHEETS]
    ),
)


# --- what stages share --------------------------------------------------------------------------------------------


def real_clips(scenes: Sequence[Scene]) -> Tensor:
    """Clips as training has them, BCTHW in [-1, 1]."""
    generator = torch.Generator().manual_seed(5)
    parts = (scenes[first : first + SHAPES.chunk] for first in range(0, len(scenes), SHAPES.chunk))
    return torch.cat([draw_scenes(part, generator) for part in parts])


def neutral_captions(scenes: Sequence[Scene]) -> list[str]:
    generator = torch.Generator().manual_seed(6)
    return [neutral_caption(scene, generator) for scene in scenes]


def _asked(demo: ShapesDemo) -> list[tuple[Scene, str]]:
    """Every scored scene, kind by kind, with its caption."""
    scenes = _all(demo.scenes)
    return list(zip(scenes, score.scored_captions(scenes), strict=True))


def _all(by_kind: Mapping[str, Sequence[Item]]) -> list[Item]:
    return [item for items in by_kind.values() for item in items]


def _by_kind(asked: Mapping[str, Sequence[Scene]], video_BCTHW: Tensor, score_of: ScoreOf = score.score):
    """The score of each kind of scene."""
    parts = video_BCTHW.split([len(scenes) for scenes in asked.values()])
    return {kind: score_of(part, scenes) for (kind, scenes), part in zip(asked.items(), parts, strict=True)}


def _showcase(demo: ShapesDemo) -> list[int]:
    """Clips to look at, evenly spread over those that are scored."""
    first, chosen = 0, []
    for kind, scenes in demo.scenes.items():
        chosen += contact_sheets.spread(range(first, first + len(scenes)), SHOWN[kind])
        first += len(scenes)
    return chosen


def _row(scene: Scene, caption: str, video_CTHW: Tensor) -> contact_sheets.SheetRow:
    (verdict,) = classify(video_CTHW[None])
    is_right = score.right(verdict, scene)
    wrong = {name: False for name, is_so in is_right.items() if not is_so and name != "all"}
    note = "unseen" if scene.is_unseen else ""
    return contact_sheets.SheetRow(caption, video_CTHW, wrong or {"as told": True}, note)


# --- the command --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapesOptions:
    out: Path = setting(Path("runs/demo-shapes"), "folder for everything (default: {default})")
    ranks: int | None = setting(None, "training processes (default: one a GPU or core, two at most)", low=1)
    quick: bool = setting(False, "test every stage with hardly any training")


@command(
    ShapesOptions,
    prog="megadit demo-shapes",
    description="Trains on captioned scenes of moving things; makes videos from captions and first frames, edits "
    "clips, trains an adapter for one more thing, and scores all of them.",
)
def main(options: ShapesOptions) -> int:
    """Runs `megadit demo-shapes`; returns its exit code."""
    size, ranks = QUICK if options.quick else Size(), options.ranks or ranks_that_gain()
    demo = ShapesDemo(out=options.out, size=size, num_ranks=ranks)
    run_and_show(demo, STAGES, summary_table, demo.out / "contact_sheet.png", demo.videos / "all.gif")
    print(
        f"Make your own: megadit generate --checkpoint_path {demo.bundle} "
        '--prompt "a red star rises left of a blue heart"'
    )
    return 0


def summary_table(found: dict[str, Any]) -> str:
    """One line for each kind of scene and source of clips, with the 95 % interval of `all`."""
    shares = ("shape", "colour", "action", "relation", "all")
    lines = [f"{'':28}{'clips':>6}" + "".join(f"{name:>10}" for name in shares) + f"{'95 %':>18}"]
    for source in ("text", "first_frame", "edited", "adapter", "no_adapter", "real_decoded"):
        for kind, values in found[source].items():
            numbers = "".join(f"{values[share]:>10.1%}" for share in shares)
            low, high = values["interval"]
            name = f"{source}, {kind}".replace("_", " ")
            lines.append(f"{name:28}{values['num_clips']:>6}{numbers}{f'{low:.1%} to {high:.1%}':>18}")
    return "\n".join(lines)
