"""The score of `make demo-shapes`: how many clips show what their captions say, with 95 % intervals."""

from collections.abc import Sequence
from itertools import permutations

import torch
from torch import Tensor

from megadit.infer.evaluate.metrics.intervals import wilson
from megadit.train.demos.shapes.classifier import Seen, Verdict, classify, relation
from megadit.train.demos.shapes.data import Scene, random_captions, random_scenes

GROUPS: dict[str, tuple[int, bool]] = {
    "single": (1, False),
    "pair": (2, False),
    "single_unseen": (1, True),
    "pair_unseen": (2, True),
}
"""Kinds of captions that are scored -> number of things, and whether training never saw such scenes."""


def scored_scenes(count: int) -> dict[str, list[Scene]]:
    """`count` scenes of each kind."""
    generator = torch.Generator().manual_seed(11)
    return {
        name: random_scenes(count, num_things, generator, unseen=unseen)
        for name, (num_things, unseen) in GROUPS.items()
    }


def scored_captions(scenes: Sequence[Scene]) -> list[str]:
    return random_captions(scenes, torch.Generator().manual_seed(0))


def right(verdict: Verdict, scene: Scene) -> dict[str, bool]:
    """Compare a clip with its scene. Of two things, shape and colour count for both; `all`: everything is right.

    Where neither acts, or both do, they are taken in the order that is right in more.
    """
    if len(verdict.things) != scene.num_things:
        return dict.fromkeys(("shape", "colour", "action", "relation", "all"), False)
    orders = [(verdict.mover, verdict.other)] if verdict.mover else permutations(verdict.things)
    return max(
        (_right(mover, other, scene, verdict.mover is not None) for mover, other in orders),
        key=lambda found: sum(found.values()),
    )


def _right(mover: Seen, other: Seen | None, scene: Scene, one_acts: bool) -> dict[str, bool]:
    found = {
        "shape": mover.shape == scene.shape,
        "colour": mover.colour == scene.colour and mover.becomes == scene.becomes,
        "action": one_acts and mover.action == scene.action,
        "relation": True,
    }
    if scene.relation is not None:
        found["shape"] &= other.shape == scene.other_shape
        found["colour"] &= other.colour == scene.other_colour and other.becomes is None
        found["relation"] = relation(mover, other) == scene.relation
    return {**found, "all": all(found.values())}


def score(video_BCTHW: Tensor, scenes: Sequence[Scene]) -> dict[str, float | int | list[float]]:
    """Shares, 0..1, of clips (BCTHW in [-1, 1]) that show their scene; `interval`: Wilson's, of `all`."""
    rows = [right(verdict, scene) for verdict, scene in zip(classify(video_BCTHW), scenes, strict=True)]
    shares = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    interval = [round(end, 4) for end in wilson(shares["all"], len(rows))]
    return {**{name: round(share, 4) for name, share in shares.items()}, "interval": interval, "num_clips": len(rows)}
