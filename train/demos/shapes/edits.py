"""Edits of scenes: what a clip shows, but for the shape, the colour or the action of the thing that acts.

Nothing is trained for it: a clip is noised, and what its new caption says is made of it (`--input_video --strength`).

Shapes: B clips, C colour channels, T/H/W frames, height, width.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from megadit.train.demos.digits.data import COLOURS
from megadit.train.demos.shapes.classifier import name_backgrounds
from megadit.train.demos.shapes.data import ACTIONS, SHAPES, Scene, captions
from megadit.train.demos.shapes.score import score

CHANGES = "shape", "colour", "action"
SIGMAS, STRENGTH = (80.0, 8.0, 4.0, 1.0, 0.3), 0.8
"""Clips are noised to the second of these levels: from the third on most shapes can no longer change."""


def edits(scenes: Sequence[Scene]) -> dict[str, list[tuple[Scene, Scene]]]:
    """Kind of change -> every third scene before and after it; new names come in turns."""
    return {
        change: [(scene, _edited(scene, change, turn)) for turn, scene in enumerate(scenes[first :: len(CHANGES)])]
        for first, change in enumerate(CHANGES)
    }


def _edited(scene: Scene, change: str, turn: int) -> Scene:
    if change == "shape":
        return replace(scene, shape=_another(SHAPES, {scene.shape, scene.other_shape}, turn))
    if change == "colour":
        taken = {scene.colour, scene.becomes, scene.other_colour}
        return replace(scene, colour=_another(COLOURS, taken, turn))
    return replace(scene, action=_another(ACTIONS, {scene.action, "recolour"}, turn), becomes=None)


def _another(names: Iterable[str], taken: set[str | None], turn: int) -> str:
    free = [name for name in names if name not in taken]
    return free[turn % len(free)]


def full_caption(scene: Scene) -> str:
    """A caption that names everything, the background too."""
    return captions(scene)[1]


def score_edits(video_BCTHW: Tensor, scenes: Sequence[Scene]) -> dict[str, Any]:
    """The score of the scenes; `background`: the share of clips that have theirs."""
    found = name_backgrounds(video_BCTHW)
    kept = sum(name == scene.background for name, scene in zip(found, scenes, strict=True))
    return {**score(video_BCTHW, scenes), "background": round(kept / len(scenes), 4)}
