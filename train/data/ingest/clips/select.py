"""Selection of the clips that become samples, with their split and shard, from all findings together."""

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
from megadit.train.data.ingest.plan import NOTES, Clip, Notes, Settings, Skip, clip_from_json, skip_from_json

BAND_BITS = 24
FINGERPRINT_BITS = 192
SPLITS = ("train", "val")
Filter = Callable[[Sequence[Clip]], tuple[Sequence[Clip], Sequence[Skip]]]
"""Function from clips to those that are kept, and skips of the others."""
_NUM_SET_BITS = np.array([number.bit_count() for number in range(1 << 16)], np.uint8)


class Fingerprints:
    """Index of fingerprints that finds earlier clips which differ in a few bits.

    Fingerprints that differ in fewer bits than there are bands agree in at least one band: only those are compared.
    Bands of zeros (flat areas such as letterbox bars) are ignored. With eight bands a clip takes 140 bytes of memory.
    """

    def __init__(self, clips: Iterable[tuple[str, str]], max_bits: int) -> None:
        """`clips`: fingerprint and caption of all clips. Clips with different captions are not duplicates; an empty
        caption equals any other."""
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
        self._bands = [_lists(np.frombuffer(bits_N, np.int32)) for bits_N in bands]

    def duplicates(self) -> Iterator[int | None]:
        """Yield for each clip the number of an earlier duplicate, or None, and add it to the index."""
        for number in range(len(self._captions_N)):
            original = self.find(number)
            if original is None:
                self.remember(number)
            yield original

    def find(self, number: int) -> int | None:
        """The first duplicate, in the first band that has one."""
        print_H, caption = self._prints_NH[number], self._captions_N[number]
        for start_N, number_N, count_N in self._bands:
            start = start_N[number]
            others = number_N[start : start + count_N[start]]
            if caption and len(others):
                captions = self._captions_N[others]
                others = others[(captions == caption) | (captions == 0)]
            if len(others):
                is_alike = _NUM_SET_BITS[self._prints_NH[others] ^ print_H].sum(axis=1) <= self.max_bits
                if is_alike.any():
                    return int(others[is_alike.argmax()])
        return None

    def remember(self, number: int) -> None:
        for start_N, number_N, count_N in self._bands:
            if (start := start_N[number]) >= 0:
                number_N[start + count_N[start]] = number
                count_N[start] += 1


def _lists(bits_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lists of clips with equal bits in one array: start of each clip's list (-1 if no bit is set), the array, and the
    number of entries of the list that starts at each place (0 at -1)."""
    _, list_N, size_L = np.unique(bits_N, return_inverse=True, return_counts=True)
    start_N = np.where(bits_N == 0, -1, (np.cumsum(size_L) - size_L)[list_N]).astype(np.int32)
    return start_N, np.empty_like(start_N), np.zeros(len(start_N) + 1, np.int32)


def select(notes: Notes, settings: Settings, filters: Sequence[Filter]) -> None:
    """Apply the filters in order, and write the plan of each split and the counts."""
    clips, of_sources, seconds = LongList(clip_from_json), LongList(skip_from_json), array("d")
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
    write_lines(notes.skips, chain(read_lines(notes.skipped), *skips, of_sources))
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


def divide(clips: Iterable[Clip], why_not: Iterable[tuple[str, str] | None]) -> tuple[LongList[Clip], LongList[Skip]]:
    """Divide clips into kept and left out ones; `why_not` yields a reason with detail for each, or None."""
    kept, skips = LongList(clip_from_json), LongList(skip_from_json)
    for clip, why in zip(clips, why_not, strict=True):
        if why is None:
            kept.append(clip)
        else:
            skips.append(clip.left_out(*why))
    return kept, skips


def drop_duplicates(clips: Sequence[Clip], settings: Settings) -> tuple[Sequence[Clip], Sequence[Skip]]:
    """Keep the first of each group of near-duplicates, in the order of the sources."""
    if settings.max_duplicate_bits < 0:
        return clips, []
    any_caption = settings.duplicates == "any_caption"
    prints = ((clip.fingerprint, "" if any_caption else clip.source.caption) for clip in clips)
    source_media = Fingerprints(prints, settings.max_duplicate_bits).duplicates()
    return divide(clips, (None if each is None else ("near-duplicate", clips[each].place) for each in source_media))


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


def drop_annotated(clips: Sequence[Clip], settings: Settings) -> tuple[Sequence[Clip], Sequence[Skip]]:
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
    source_media = map(seen.find, range(len(known), len(known) + len(clips)))
    return divide(clips, (None if each is None else ("in another data set", known[each][1]) for each in source_media))


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
    """Give clips without a caption `settings.default_caption`."""
    if not settings.default_caption:
        return clips, []
    captioned, default = LongList(clip_from_json), settings.default_caption
    captioned.extend(
        replace(clip, source=replace(clip.source, caption=clip.source.caption or default)) for clip in clips
    )
    return captioned, []


def validation_sources(clips: Iterable[Clip], settings: Settings) -> set[str]:
    """Keys of the sources of the validation split (a fraction, rounded up, but never all)."""
    numbers = array("Q", (int(key, 16) for key, _ in groupby(clip.source.key for clip in clips)))
    count = min(math.ceil(settings.val_share * len(numbers)), len(numbers) - 1)
    keys = (f"{number:016x}" for number in numbers)
    return set(heapq.nsmallest(count, keys, key=lambda key: _draw(settings.seed, f"val {key}")))


def shards(num_clips: int, shard_size: int) -> list[slice]:
    """Divide clips into the fewest shards of at most `shard_size`, of equal size up to one."""
    count = math.ceil(num_clips / shard_size)
    bounds = [num_clips * number // count for number in range(count + 1)] if count else [0]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def _draw(seed: int, key: str) -> bytes:
    """Pseudo-random bytes determined by seed and key."""
    return hashlib.blake2b(f"{seed} {key}".encode(), digest_size=16).digest()
