"""Update of a data set whose source has changed: differences, and reuse of findings."""

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby, repeat

from megadit.models.shared.files import atomic_path
from megadit.train.data.ingest.lines import read_lines, to_json
from megadit.train.data.ingest.plan import Finding, Notes, Source, finding_from_json, source_from_json

_KINDS = ("new", "another file now", "of another caption or score", "gone")


def changes(before: Iterable[Source], now: Iterable[Source]) -> str:
    """Describe the differences between two listings that are sorted by name; "" if there are none."""
    counts: Counter[str] = Counter(dict.fromkeys(_KINDS, 0))
    both = heapq.merge(zip(repeat("old"), before), zip(repeat("new"), now), key=_name)  # noqa: B905  (one is endless)
    for _, group in groupby(both, key=_name):
        found = dict(group)
        if len(found) == 1:
            counts["new" if "new" in found else "gone"] += 1
            continue
        old, new = found["old"], found["new"]
        if _is_other_file(old, new):
            counts["another file now"] += 1
        elif (old.captions, old.aesthetic_score) != (new.captions, new.aesthetic_score):
            counts["of another caption or score"] += 1
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def _name(side_and_source: tuple[str, Source]) -> str:
    return side_and_source[1].name


def _is_other_file(old: Source, new: Source) -> bool:
    is_stamped = bool(old.stamp and new.stamp)
    return (old.offset, old.size) != (new.offset, new.size) or (is_stamped and old.stamp != new.stamp)


def keep_findings(notes: Notes) -> None:
    """Save the findings of sources with a stamp, for reuse."""
    sources = read_lines(notes.sources)
    with atomic_path(notes.previous) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for finding in notes.findings():  # in the order of the sources, with gaps where a scan was stopped
            source = next((each for each in sources if each["name"] == finding.source), None)
            if source and source.get("stamp"):
                file.write(json.dumps([source, to_json(finding)], ensure_ascii=False) + "\n")


class EarlierFindings:
    """Reader of the findings that `keep_findings` saved, for sources in order."""

    def __init__(self, notes: Notes) -> None:
        self._lines: Iterator[list] = read_lines(notes.previous) if notes.previous.is_file() else iter(())
        self._next = next(self._lines, None)

    def of(self, source: Source) -> Finding | None:
        """The finding of a source whose content has not changed."""
        while self._next is not None and self._next[0]["name"] < source.name:
            self._next = next(self._lines, None)
        if self._next is None or source_from_json(self._next[0]).content != source.content:
            return None
        return finding_from_json(self._next[1]).of(source)
