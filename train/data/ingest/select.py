"""Selection of the clips that become samples, with their split and shard: decided once, from all findings together."""

import hashlib
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json
from megadit.train.data.ingest.lines import read_lines, write_lines
from megadit.train.data.ingest.plan import NOTES, Clip, Finding, Notes, Settings, Skip, clip_from_json

BAND_BITS = 24
FINGERPRINT_BITS = 192
SPLITS = ("train", "val")
Filter = Callable[[list[Clip]], tuple[list[Clip], list[Skip]]]
"""Function from clips to those that are kept, and the reasons for the others."""


class Fingerprints:
    """Finds fingerprints that differ in a few bits from one seen before.

    Two that differ in fewer bits than there are bands agree in a whole band: only those are compared. A band of zeros
    is a flat part of the pictures (the bars above and below a film) and says nothing.
    """

    def __init__(self, max_bits: int, *, any_caption: bool = True) -> None:
        """Without `any_caption` two whose captions differ are no duplicates; an empty caption differs from none."""
        self.max_bits = max_bits
        self._any_caption = any_caption
        self._width = min(BAND_BITS, FINGERPRINT_BITS // (max_bits + 1))
        self._seen: dict[tuple[int, int, str | None], list[tuple[int, int, str]]] = {}
        """(place and bits of a band, caption; None: all of them) -> (count, fingerprint, name), in their order."""
        self._count = 0

    def duplicate_of(self, fingerprint: str, name: str, caption: str = "") -> str | None:
        """The name of an earlier one like it; without one, remembers this."""
        found = self.find(fingerprint, caption)
        if found is None:
            self.remember(fingerprint, name, caption)
        return found

    def find(self, fingerprint: str, caption: str = "") -> str | None:
        """The name of one like it."""
        number = int(fingerprint, 16)
        for band in self._bands(number):
            for _, other, name in self._candidates(band, caption):
                if (number ^ other).bit_count() <= self.max_bits:
                    return name
        return None

    def remember(self, fingerprint: str, name: str, caption: str = "") -> None:
        number = int(fingerprint, 16)
        self._count += 1
        for band in self._bands(number):
            for key in [None] if self._any_caption else [None, caption]:
                self._seen.setdefault((*band, key), []).append((self._count, number, name))

    def _bands(self, number: int) -> list[tuple[int, int]]:
        """(place, bits) of each."""
        bands = [
            (place, number >> place & (1 << self._width) - 1)
            for place in range(0, FINGERPRINT_BITS - self._width + 1, self._width)
        ]
        return [band for band in bands if band[1]] or [(-1, number)]

    def _candidates(self, band: tuple[int, int], caption: str) -> Iterable[tuple[int, int, str]]:
        """Clips with the same fingerprint band and compatible captions, in the order in which they were added."""
        if self._any_caption or not caption:
            return self._seen.get((*band, None), ())
        return heapq.merge(self._seen.get((*band, caption), ()), self._seen.get((*band, ""), ()))


def select(notes: Notes, settings: Settings, filters: Sequence[Filter]) -> None:
    """Writes the plan of each split and the selection's counts; each filter sees what those before it kept, the first
    what is no duplicate."""
    findings = list(notes.findings())
    clips, duplicates = drop_duplicates(findings, settings)
    skips = [*(Skip(**values) for values in read_lines(notes.skipped)), *duplicates]
    for keep in filters:
        clips, left_out = keep(clips)
        skips += left_out
    validation = validation_sources({clip.source.key for clip in clips}, settings)
    train = [clip for clip in clips if clip.source.key not in validation]
    if settings.mirror:
        train += [replace(clip, key=f"{clip.key}-mirrored", is_mirrored=True) for clip in train]
    plans = {"train": train, "val": [clip for clip in clips if clip.source.key in validation]}
    for split in SPLITS:
        write_lines(notes.plan(split), sorted(plans[split], key=lambda clip: _draw(settings.seed, clip.key)))
    skips += [skip for finding in findings for skip in finding.skips]
    write_lines(notes.skips, skips)
    write_json(
        notes.selection,
        {
            "sources": len(findings),
            "hours_read": sum(finding.seconds for finding in findings) / 3600,
            "clips_found": sum(len(finding.clips) for finding in findings),
            "clips_selected": {split: len(plan) for split, plan in plans.items()},
            "duplicates": len(duplicates),
        },
    )


def drop_duplicates(findings: Iterable[Finding], settings: Settings) -> tuple[list[Clip], list[Skip]]:
    """The first of each group of clips that look alike, in the order of the sources."""
    any_caption = settings.duplicates == "any_caption"
    seen = (
        Fingerprints(settings.max_duplicate_bits, any_caption=any_caption) if settings.max_duplicate_bits >= 0 else None
    )
    kept: list[Clip] = []
    skips: list[Skip] = []
    for clip in (clip for finding in findings for clip in finding.clips):
        original = seen.duplicate_of(clip.fingerprint, clip.place, clip.source.caption) if seen is not None else None
        if original is None:
            kept.append(clip)
            continue
        skips.append(clip.left_out("near-duplicate", original))
    return kept, skips


def check_not_in(settings: Settings, root: Path) -> None:
    """Raises UserError for data sets of `--not_in` that cannot be compared with the one at `root`."""
    if settings.not_in and settings.max_duplicate_bits < 0:
        raise UserError("--not_in leaves out near-duplicates, and --max_duplicate_bits -1 keeps them; give one of them")
    for dataset in settings.not_in:
        if Path(dataset).resolve() == root.resolve():
            raise UserError(f"--not_in {dataset} is the data set that is to be made; name another")
        if not Notes(root=Path(dataset)).selection.is_file():
            raise UserError(
                f"--not_in {dataset}: no fingerprints of clips lie in {NOTES}/ there, as `megadit prepare` of videos "
                "and images leaves them"
            )


def drop_known(clips: Sequence[Clip], settings: Settings) -> tuple[list[Clip], list[Skip]]:
    """Keep clips that look like none of the clips of the data sets `settings.not_in`, in their order.

    Raises:
        UserError: for notes of a data set that hold something else.
    """
    known = Fingerprints(max(0, settings.max_duplicate_bits))
    for dataset in settings.not_in:
        _remember_all(known, dataset)
    kept: list[Clip] = []
    skips: list[Skip] = []
    for clip in clips:
        if (original := known.find(clip.fingerprint)) is None:
            kept.append(clip)
        else:
            skips.append(clip.left_out("in another data set", original))
    return kept, skips


def _remember_all(known: Fingerprints, dataset: str) -> None:
    for split in SPLITS:
        path = Notes(root=Path(dataset)).plan(split)
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    clip = clip_from_json(parse_json(line, str(path)))
                    known.remember(clip.fingerprint, f"{dataset}: {clip.place}")
                except (TypeError, LookupError, ValueError):
                    raise UserError(f"--not_in: {path}, line {number} is no clip of a data set") from None


def add_caption(clips: Sequence[Clip], settings: Settings) -> tuple[list[Clip], list[Skip]]:
    """All of them; those without a caption get `settings.default_caption`."""
    if not settings.default_caption:
        return list(clips), []
    captioned = [replace(clip.source, caption=clip.source.caption or settings.default_caption) for clip in clips]
    return [replace(clip, source=source) for clip, source in zip(clips, captioned, strict=True)], []


def validation_sources(keys: set[str], settings: Settings) -> set[str]:
    """A share of the sources, rounded up, but never all: clips of one video lie in one split."""
    count = min(math.ceil(settings.val_share * len(keys)), len(keys) - 1)
    return set(sorted(keys, key=lambda key: _draw(settings.seed, f"val {key}"))[:count]) if count > 0 else set()


def shards(clips: list[Clip], shard_size: int) -> list[list[Clip]]:
    """Divide clips into the fewest shards of at most `shard_size`, equally large give or take one."""
    count = math.ceil(len(clips) / shard_size)
    bounds = [len(clips) * number // count for number in range(count + 1)] if count else [0]
    return [clips[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def _draw(seed: int, key: str) -> bytes:
    """A random number that belongs to the key."""
    return hashlib.blake2b(f"{seed} {key}".encode(), digest_size=16).digest()
