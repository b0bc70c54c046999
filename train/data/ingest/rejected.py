"""Pictures of left out sources, a few for each reason, for `megadit info DATA --html PAGE`."""

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import Image

from megadit.infer.decoding.rules import UnusableSourceError
from megadit.models.shared.files import atomic_directory
from megadit.train.data.ingest.clips.decode import read_preview
from megadit.train.data.ingest.lines import Lines, read_lines, write_lines
from megadit.train.data.ingest.plan import Notes, Settings, Skip, Source, skip_from_json, source_from_json
from megadit.train.data.ingest.pool import Pool

OF_A_REASON = 12
HEIGHT = 128
"""Pixels of a picture."""


@dataclass(frozen=True, slots=True)
class Example:
    skip: Skip
    source: Source | None
    """The source; None if it was never fetched or listed."""


def picture_left_out(notes: Notes, settings: Settings, num_workers: int) -> None:
    """Write `left_out.jsonl`, the skips to show, and `0.jpg`, `1.jpg`, ... of those that can be decoded."""
    chosen = choose(Lines.open(notes.skips, skip_from_json))
    names = {skip.source for skip in chosen}
    sources = {
        values["name"]: source_from_json(values) for values in read_lines(notes.sources) if values["name"] in names
    }
    examples = [Example(skip, sources.get(skip.source)) for skip in chosen]
    with atomic_directory(notes.left_out) as folder, Pool(num_workers) as pool:
        write_lines(folder / "left_out.jsonl", chosen)
        pictures = pool.map(partial(_preview, settings=settings), examples, _nothing)
        for number, picture_HWC in enumerate(pictures):
            if picture_HWC is not None:
                Image.fromarray(picture_HWC).save(folder / f"{number}.jpg", quality=85)


def choose(skips: Sequence[Skip]) -> list[Skip]:
    """Choose up to a dozen skips of each reason, evenly spaced."""
    groups: dict[str, array] = defaultdict(lambda: array("q"))
    for number, skip in enumerate(skips):
        groups[skip.reason].append(number)
    return [
        skips[group[number * len(group) // count]]
        for group in groups.values()
        for count in [min(OF_A_REASON, len(group))]
        for number in range(count)
    ]


def _preview(examples: Example, settings: Settings) -> np.ndarray | None:
    if examples.source is None:
        return None
    try:
        middle = examples.skip.start + examples.skip.seconds / 2
        return read_preview(examples.source, settings, middle, HEIGHT)
    except UnusableSourceError:  # which may be why it was left out
        return None


def _nothing(_: Example) -> None:
    return None
