"""Summary of a folder of videos or images: sizes, lengths, captions. Nothing is written."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megadit.infer.decoding.rules import UnusableSourceError
from megadit.models.shared.errors import UserError
from megadit.train.data.ingest.clips.decode import read_image, read_timeline
from megadit.train.data.ingest.plan import Kind, Settings, Source
from megadit.train.data.ingest.sources.files import open_folder
from megadit.train.data.ingest.sources.sources import SUFFIXES, kinds_in, list_folder

MOST_PROBED = 48
"""Number of sources to open, evenly spaced."""
MOST_FRAMES, MOST_SECONDS = 240, 4.0
"""Limits of decoded frames and seconds per source, whichever is more, so that a clip at the target rate fits."""
USUAL_SIDE, SIDE_STEP = 256, 16
"""Default size of samples in pixels: the largest side, and the number that sides are a multiple of."""
OWN_RATE = Settings(fps=240.0)
"""Settings that keep the frame rate of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Properties of one source."""

    height: int
    width: int
    fps: float
    """0 for an image."""
    frames: int
    """Number of decoded frames."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderSummary:
    """Summary of a folder's contents."""

    kind: Kind
    count: int
    """Number of sources, with those that cannot be read."""
    seen: tuple[Seen, ...]
    """Properties of the sources that were opened and could be read."""
    unusable: dict[str, int]
    """Reason -> number of sources that could not be read."""
    captions: tuple[str, ...]
    """Captions that are not empty."""


def summarize(root: str, table: str | None = None) -> FolderSummary:
    """Summarize a folder as `megadit prepare videos` would read it, or `images` if it holds no video.

    Raises:
        UserError: if it is no folder of either, or nothing in it can be read.
    """
    folder = open_folder(root)
    if folder is None:
        raise UserError(f"{root} is not a folder, or does not exist; give one of videos or images")
    kinds = [kind for kind in ("video", "image") if any(kind in kinds_in(folder, name) for name in folder.names())]
    if not kinds and table is None:
        raise UserError(f"{root} holds neither videos ({', '.join(SUFFIXES['video'])}) nor images; give another folder")
    kind: Kind = kinds[0] if kinds else "image"
    sources = list_folder(root, kind, table).sources
    seen, unusable = summarize_sources(sources)
    if not seen:
        raise UserError(
            f"none of {min(len(sources), MOST_PROBED)} {kind}s of {root} can be read ({', '.join(unusable)})"
        )
    captions = tuple(source.caption for source in sources if source.caption)
    return FolderSummary(kind=kind, count=len(sources), seen=tuple(seen), unusable=dict(unusable), captions=captions)


def summarize_sources(sources: Sequence[Source]) -> tuple[list[Seen], Counter[str]]:
    """Open some of the sources, evenly over all; return their properties, and the reasons why others cannot be read."""
    count = min(len(sources), MOST_PROBED)
    seen, unusable = [], Counter()
    for source in (sources[number * len(sources) // count] for number in range(count)):
        try:
            seen.append(_see(source))
        except UnusableSourceError as error:
            unusable[error.reason] += 1
    return seen, unusable


def side_filled(seen: Sequence[Seen]) -> int:
    """Return the side of square samples that nine of ten sources fill, `USUAL_SIDE` at most."""
    sides = sorted(min(each.height, each.width) for each in seen)
    filled = sides[len(sides) // 10] if sides else USUAL_SIDE
    return max(SIDE_STEP, min(USUAL_SIDE, filled // SIDE_STEP * SIDE_STEP))


def _see(source: Source) -> Seen:
    if source.kind == "image":
        image = read_image(source, OWN_RATE)
        return Seen(height=image.height, width=image.width, fps=0.0, frames=1)
    timeline = read_timeline(source, OWN_RATE, lambda fps: max(MOST_FRAMES, math.ceil(MOST_SECONDS * fps)))
    return Seen(height=timeline.height, width=timeline.width, fps=timeline.fps, frames=len(timeline.pts))
