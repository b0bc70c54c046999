"""Selection of the clips that become samples, with their split and shard: decided once, from all findings together."""

import hashlib
import heapq
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby, pairwise
from pathlib import Path

import numpy as np

from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import write_json
from megadit.train.data.ingest.lines import LongList, read_lines, write_lines
from megadit.train.data.ingest.plan import (
    NOTES,
    Clip,
    Notes,
    Settings,
    Skip,
    clip_from_json,
    long_lists,
    skip_from_json,
)

BAND_BITS = 24
FINGERPRINT_BITS = 192
SPLITS = ("train", "val")
Filter = Callable[[Sequence[Clip]], tuple[Sequence[Clip], Sequence[Skip]]]
"""Function from clips to those that are kept, and the reasons for the others."""
_NUM_SET_BITS = np.array([number.bit_count() for number in range(1 << 16)], np.uint8)


class Fingerprints:
    """Finds, among the clips remembered so far, one whose fingerprint differs in a few bits.

    Two that differ in fewer bits than there are bands agree in a whole band: only those are compared. A band of zeros
    is a flat part of the pictures (the bars above and below a film) and says nothing. Of each clip 140 bytes are in
    memory, with eight bands.
    """

    def __init__(self, clips: Iterable[tuple[str, str]], max_bits: int) -> None:
        """`clips`: fingerprint and caption of all that will be asked about; two whose captions differ are no
        duplicates, and an empty caption differs from none."""
        width = min(BAND_BITS, FINGERPRINT_BITS // (max_bits + 1))
        places, rest = range(0, FINGERPRINT_BITS - width + 1, width), FINGERPRINT_BITS // width * width
        prints, captions, bands = bytearray(), array("q"), [array("i") for _ in [*places, rest]]
        for fingerprint, caption in clips:
            number = int(fingerprint, 16)
            prints += number.to_bytes(FINGERPRINT_BITS // 8, "big")
            captions.append(hash(caption) or 1 if caption else 0)
            bits = [number >> place & (1 << width) - 1 for place in places]
            for band, value in zip(bands, [*bits, 0 if any(bits) else 1 + (number >> rest)], strict=True):
                band.append(value)
        self.max_bits = max_bits
        self._prints_NH = np.frombuffer(prints, np.uint16).reshape(-1, FINGERPRINT_BITS // 16)
        self._captions_N = np.frombuffer(captions, np.int64)
        self._bands = [_Band(np.frombuffer(bits_N, np.int32)) for bits_N in bands]

    def duplicates(self) -> Iterator[int | None]:
        """Yields, for each clip, the number of an earlier one like it, or None; then it is remembered."""
        for number in range(len(self._captions_N)):
            original = self.find(number)
            if original is None:
                self.remember(number)
            yield original

    def find(self, number: int) -> int | None:
        """The first one like it, in the first band in which there is one."""
        print_H, caption = self._prints_NH[number], self._captions_N[number]
        for band in self._bands:
            others = band.like(number)
            if caption and len(others):
                captions = self._captions_N[others]
                others = others[(captions == caption) | (captions == 0)]
            if len(others):
                is_alike = _NUM_SET_BITS[self._prints_NH[others] ^ print_H].sum(axis=1) <= self.max_bits
                if is_alike.any():
                    return int(others[is_alike.argmax()])
        return None

    def remember(self, number: int) -> None:
        for band in self._bands:
            band.add(number)


class _Band:
    """Lists of clips with equal bits in one band. All lie in one array, each with room for all that may come."""

    def __init__(self, bits_N: np.ndarray) -> None:
        _, lists_N, sizes = np.unique(bits_N, return_inverse=True, return_counts=True)
        starts_N = (np.cumsum(sizes) - sizes)[lists_N]
        self._starts_N = np.where(bits_N == 0, -1, starts_N).astype(np.int32)
        self._numbers_N, self._counts_N = np.empty_like(self._starts_N), np.zeros_like(self._starts_N)

    def like(self, number: int) -> np.ndarray:
        start = self._starts_N[number]
        return self._numbers_N[start : start + self._counts_N[start]] if start >= 0 else self._numbers_N[:0]

    def add(self, number: int) -> None:
        if (start := self._starts_N[number]) >= 0:
            self._numbers_N[start + self._counts_N[start]] = number
            self._counts_N[start] += 1


def select(notes: Notes, settings: Settings, filters: Sequence[Filter]) -> None:
    """Writes the plan of each split and the selection's counts; each filter sees what those before it kept."""
    (clips, of_sources), seconds = long_lists(), array("d")
    for finding in notes.findings():
        seconds.append(finding.seconds)
        clips.extend(finding.clips)
        of_sources.extend(finding.skips)
    num_found, skips = len(clips), []
    for keep in (lambda clips: drop_duplicates(clips, settings), *filters):
        clips, left_out = keep(clips)
        skips.append(left_out)
    plans = {split: LongList(clip_from_json, lambda clip: _draw(settings.seed, clip.key)) for split in SPLITS}
    validation = validation_sources(clips, settings)
    for clip in clips:
        split = "val" if clip.source.key in validation else "train"
        plans[split].append(clip)
        if settings.mirror and split == "train":
            plans[split].append(replace(clip, key=f"{clip.key}-mirrored", is_mirrored=True))
    for split, plan in plans.items():
        plan.sort()
        plan.write(notes.plan(split))
    write_lines(notes.skips, chain(map(skip_from_json, read_lines(notes.skipped)), *skips, of_sources))
    write_json(
        notes.selection,
        {
            "sources": len(seconds),
            "hours_read": sum(seconds) / 3600,
            "clips_found": num_found,
            "clips_selected": {split: len(plan) for split, plan in plans.items()},
            "duplicates": len(skips[0]),
        },
    )


def drop_duplicates(clips: Sequence[Clip], settings: Settings) -> tuple[Sequence[Clip], Sequence[Skip]]:
    """The first of each group of clips that look alike, in the order of the sources."""
    if settings.max_duplicate_bits < 0:
        return clips, []
    any_caption = settings.duplicates == "any_caption"
    seen = Fingerprints(
        ((clip.fingerprint, "" if any_caption else clip.source.caption) for clip in clips), settings.max_duplicate_bits
    )
    kept, skips = long_lists()
    for clip, original in zip(clips, seen.duplicates(), strict=True):
        if original is None:
            kept.append(clip)
        else:
            skips.append(clip.left_out("near-duplicate", clips[original].place))
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


def drop_known(clips: Sequence[Clip], settings: Settings) -> tuple[Sequence[Clip], Sequence[Skip]]:
    """Keep clips that look like none of the clips of the data sets `settings.not_in`, in their order.

    Raises:
        UserError: for notes of a data set that hold something else.
    """
    if not settings.not_in:
        return clips, []
    known: LongList[list[str]] = LongList(lambda values: values)
    for dataset in settings.not_in:
        known.extend((clip.fingerprint, f"{dataset}: {clip.place}") for clip in _clips_of(dataset))
    prints = chain((fingerprint for fingerprint, _ in known), (clip.fingerprint for clip in clips))
    seen = Fingerprints(((fingerprint, "") for fingerprint in prints), settings.max_duplicate_bits)
    for number in range(len(known)):
        seen.remember(number)
    kept, skips = long_lists()
    for number, clip in enumerate(clips, len(known)):
        if (original := seen.find(number)) is None:
            kept.append(clip)
        else:
            skips.append(clip.left_out("in another data set", known[original][1]))
    return kept, skips


def _clips_of(dataset: str) -> Iterator[Clip]:
    for split in SPLITS:
        path = Notes(root=Path(dataset)).plan(split)
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    clip = clip_from_json(parse_json(line, str(path)))
                    int(clip.fingerprint, 16).to_bytes(FINGERPRINT_BITS // 8), clip.place
                except (TypeError, LookupError, ValueError, ArithmeticError):
                    raise UserError(f"--not_in: {path}, line {number} is no clip of a data set") from None
                yield clip


def add_caption(clips: Sequence[Clip], settings: Settings) -> tuple[Sequence[Clip], Sequence[Skip]]:
    """All of them; those without a caption get `settings.default_caption`."""
    if not settings.default_caption:
        return clips, []
    kept, skips = long_lists()
    captioned = (replace(clip.source, caption=clip.source.caption or settings.default_caption) for clip in clips)
    kept.extend(replace(clip, source=source) for clip, source in zip(clips, captioned, strict=True))
    return kept, skips


def validation_sources(clips: Iterable[Clip], settings: Settings) -> set[str]:
    """Keys of a share of the sources, rounded up, but never all: clips of one video lie in one split."""

    def keys() -> Iterator[str]:
        return (key for key, _ in groupby(clip.source.key for clip in clips))

    num_sources = sum(1 for _ in keys())
    count = min(math.ceil(settings.val_share * num_sources), num_sources - 1)
    return set(heapq.nsmallest(count, keys(), key=lambda key: _draw(settings.seed, f"val {key}")))


def shards(num_clips: int, shard_size: int) -> list[slice]:
    """Divide clips into the fewest shards of at most `shard_size`, equally large give or take one."""
    count = math.ceil(num_clips / shard_size)
    bounds = [num_clips * number // count for number in range(count + 1)] if count else [0]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def _draw(seed: int, key: str) -> bytes:
    """A random number that belongs to the key."""
    return hashlib.blake2b(f"{seed} {key}".encode(), digest_size=16).digest()
