"""`megadit demo-shapes`: a model of scenes in which things move, turn, grow and change colour, in minutes on a CPU.

    megadit demo-shapes                     # everything under runs/demo-shapes
    megadit demo-shapes --quick --out DIR   # the same stages with next to no training

One model makes scenes from captions, and goes on from a first frame.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadit.infer.given import GivenVideo
from megadit.infer.video_io import write_video
from megadit.models.bundle.bundle import Bundle
from megadit.models.shared.command import run_command
from megadit.models.shared.files import atomic_directory, read_json, write_json
from megadit.models.shared.options import read_options
from megadit.models.shared.setting import setting
from megadit.train.data.drawn import prepare_drawn
from megadit.train.digits import figures
from megadit.train.digits.clips import make_clips, read_clips, wall, watchable, write_clips
from megadit.train.digits.judge import round_trip
from megadit.train.digits.stages import Stage, TrainingDemo, run_stages, summary_of_seconds, training_stages
from megadit.train.shapes import score
from megadit.train.shapes.data import FPS, Scene, draw_scenes, neutral_caption
from megadit.train.shapes.judge import judge
from megadit.train.shapes.samples import SHAPES

SHOWN = {"single": 6, "pair": 12, "single_unseen": 3, "pair_unseen": 3}
"""Clips of each kind in the pictures."""
ZOOM = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much of everything."""

    num_clips: int = SHAPES.num_clips
    num_images: int = SHAPES.num_images
    num_val: int = SHAPES.num_val
    num_scored: int = 200
    """Captions of each kind."""
    overrides: tuple[str, ...] = ()
    """Changes of the recipe `shapes`."""


QUICK = Size(
    num_clips=60,
    num_images=60,
    num_val=10,
    num_scored=6,
    overrides=("train.train_iters=4", "checkpoint.save_interval=4", "optimizer.lr_warmup_iters=1"),
)


@dataclass(frozen=True, kw_only=True)
class ShapesDemo(TrainingDemo):
    """The folder of this demo and what goes into it."""

    size: Size = Size()

    @property
    def scenes(self) -> dict[str, list[Scene]]:
        """What the scored clips are asked to show, by kind."""
        return score.scored_scenes(self.size.num_scored)

    def clips(self, name: str) -> Path:
        return self.out / f"{name}.safetensors"


# --- stages -------------------------------------------------------------------------------------------------------


def _prepare(demo: ShapesDemo) -> None:
    size = demo.size
    prepare_drawn(SHAPES, demo.dataset, num_clips=size.num_clips, num_images=size.num_images, num_val=size.num_val)


def _generate(demo: ShapesDemo) -> None:
    make_clips(demo.clips("text"), demo.bundle, [caption for _, caption in _asked(demo)])


def _continue(demo: ShapesDemo) -> None:
    """From first frames of real clips, and captions that name neither things nor colours."""
    scenes = [scene for scene, _ in _asked(demo)]
    frames = _pixels(real_clips(scenes)[:, :, :1])
    given = [GivenVideo(frames=frame, use="first_frame") for frame in frames]
    make_clips(demo.clips("first_frame"), demo.bundle, neutral_captions(scenes), given)


def _score(demo: ShapesDemo) -> None:
    result = {name: _by_kind(demo, read_clips(demo.clips(name))) for name in ("text", "first_frame")}
    real = real_clips([scene for scene, _ in _asked(demo)])
    result["real"] = _by_kind(demo, real)
    result["real_decoded"] = _by_kind(demo, round_trip(Bundle.open(demo.bundle).load_tokenizer())(real).clamp(-1, 1))
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
    figures.contact_sheet(demo.out / "contact_sheet.png", rows, title=f"shown as told: {', '.join(shares)}")


STAGES: Sequence[Stage[ShapesDemo]] = (
    Stage("prepare", "draw captioned scenes and write them as shards", _prepare, lambda demo: [demo.dataset]),
    *training_stages("shapes", "on Megatron-core", lambda demo: demo.size.overrides),
    Stage("generate", "make a clip of each caption", _generate, lambda demo: [demo.clips("text")]),
    Stage("continue", "go on from first frames", _continue, lambda demo: [demo.clips("first_frame")]),
    Stage("score", "judge every clip", _score, lambda demo: [demo.out / "score.json"]),
    Stage("figures", "draw the contact sheet and write videos", _draw, lambda demo: [demo.out / "contact_sheet.png"]),
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
    scenes = [scene for scenes in demo.scenes.values() for scene in scenes]
    return list(zip(scenes, score.scored_captions(scenes), strict=True))


def _by_kind(demo: ShapesDemo, video_BCTHW: Tensor) -> dict[str, Any]:
    """The score of each kind of scene."""
    parts = video_BCTHW.split([len(scenes) for scenes in demo.scenes.values()])
    return {kind: score.score(part, scenes) for (kind, scenes), part in zip(demo.scenes.items(), parts, strict=True)}


def _showcase(demo: ShapesDemo) -> list[int]:
    """Clips to look at, evenly spread over those that are scored."""
    first, chosen = 0, []
    for kind, scenes in demo.scenes.items():
        chosen += figures.spread(range(first, first + len(scenes)), SHOWN[kind])
        first += len(scenes)
    return chosen


def _row(scene: Scene, caption: str, video_CTHW: Tensor) -> figures.SheetRow:
    (verdict,) = judge(video_CTHW[None])
    is_right = score.right(verdict, scene)
    wrong = {name: False for name, is_so in is_right.items() if not is_so and name != "all"}
    return figures.SheetRow(
        caption=caption,
        video_CTHW=video_CTHW,
        is_right=wrong or {"as told": True},
        note="unseen" if scene.is_unseen else "",
    )


def _pixels(video_BCTHW: Tensor):
    """uint8 BTHWC of video in [-1, 1]."""
    return ((video_BCTHW.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1).numpy()


# --- the command --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapesOptions:
    out: Path = setting(Path("runs/demo-shapes"), "folder for everything ({default})")
    ranks: int = setting(2, "training processes ({default})", low=1)
    quick: bool = setting(False, "next to no training: shows that every stage works")


def main(argv: list[str] | None = None) -> int:
    """Runs `megadit demo-shapes`; returns its exit code."""
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def _run(argv: list[str]) -> int:
    description = "Trains on captioned scenes of moving things, makes some from captions and first frames, scores them."
    options = read_options(ShapesOptions, argv, prog="megadit demo-shapes", description=description)
    demo = ShapesDemo(out=options.out, size=QUICK if options.quick else Size(), num_ranks=options.ranks)
    seconds = run_stages(demo, STAGES)
    print(summary_table(read_json(demo.out / "score.json")))
    print(f"{summary_of_seconds(seconds)}\n\nLook at {demo.out / 'contact_sheet.png'} and {demo.videos / 'all.gif'}.")
    print(
        f"Make your own: megadit generate --checkpoint_path {demo.bundle} "
        '--prompt "a red star rises left of a blue heart"'
    )
    return 0


def summary_table(found: dict[str, Any]) -> str:
    """One line for each kind of scene and source of clips, with the 95 % interval of `all`."""
    shares = ("shape", "colour", "action", "relation", "all")
    lines = [f"{'':28}{'clips':>6}" + "".join(f"{name:>10}" for name in shares) + f"{'95 %':>18}"]
    for source in ("text", "first_frame", "real_decoded"):
        for kind, values in found[source].items():
            numbers = "".join(f"{values[share]:>10.1%}" for share in shares)
            low, high = values["interval"]
            name = f"{source}, {kind}".replace("_", " ")
            lines.append(f"{name:28}{values['num_clips']:>6}{numbers}{f'{low:.1%} to {high:.1%}':>18}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
