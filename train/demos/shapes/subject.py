"""Subject for an adapter, a thing that the data set never shows: its ten training clips, and its scored scenes."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from megadit.models.bundle import Bundle
from megadit.train.data.prepare.drawn import write_few
from megadit.train.demos.digits.data import COLOURS
from megadit.train.demos.shapes.data import (
    ACTIONS,
    BACKGROUNDS,
    FPS,
    RELATIONS,
    SHAPES,
    SUBJECT,
    Scene,
    draw_scenes,
    random_captions,
)

NUM_CLIPS = 10
(NAME,) = SUBJECT


def _alone() -> list[Scene]:
    """Every colour and action, in an order whose beginning has all of them."""
    pairs = list(product(COLOURS, [name for name in ACTIONS if name != "recolour"]))
    places = [place * 13 % len(pairs) for place in range(len(pairs))]
    return [
        Scene(shape=NAME, colour=pairs[place][0], action=pairs[place][1], background=list(BACKGROUNDS)[number % 4])
        for number, place in enumerate(places)
    ]


def shown() -> list[Scene]:
    """Scenes of its training clips."""
    return _alone()[:NUM_CLIPS]


def asked() -> dict[str, list[Scene]]:
    """Scored scenes: colours and actions that its clips lack, alone, and beside another thing, as training never
    shows it."""
    alone = _alone()[NUM_CLIPS:]
    neighbours = [
        replace(
            each,
            relation=list(RELATIONS)[number % len(RELATIONS)],
            other_shape=list(SHAPES)[number % len(SHAPES)],
            other_colour=list(COLOURS)[number % len(COLOURS)],
        )
        for number, each in enumerate(alone)
    ]
    return {"subject": alone, "subject_beside": neighbours}


def write_subject(out: Path, bundle: Bundle) -> None:
    """The ten clips as a data set, by the encoders of the model that is to learn it."""
    scenes, generator = shown(), torch.Generator().manual_seed(0)
    write_few(out, bundle, NAME, draw_scenes(scenes, generator), random_captions(scenes, generator), fps=FPS)
