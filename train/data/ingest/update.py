"""A source that has changed since it was prepared: what differs, and what was found in the rest of it."""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from megadit.models.shared.files import atomic_path
from megadit.train.data.ingest.plan import (
    Finding,
    Notes,
    Source,
    finding_from_json,
    read_lines,
    source_from_json,
    to_json,
)


def changes(before: Iterable[Source], now: Iterable[Source]) -> str:
    """Describe the differences between two listings; "" if there are none."""
    earlier = {source.name: source for source in before}
    counts: Counter[str] = Counter()
    for source in now:
        old = earlier.pop(source.name, None)
        if old is None:
            counts["new"] += 1
        elif _is_other_file(old, source):
            counts["another file now"] += 1
        elif (old.captions, old.aesthetic_score) != (source.captions, source.aesthetic_score):
            counts["of another caption or score"] += 1
    counts["gone"] = len(earlier)
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def _is_other_file(old: Source, new: Source) -> bool:
    is_stamped = bool(old.stamp and new.stamp)
    return (old.offset, old.size) != (new.offset, new.size) or (is_stamped and old.stamp != new.stamp)


def keep_findings(notes: Notes) -> None:
    """Keeps what the scan found in files whose stamp says when they change."""
    sources = {values["name"]: values for values in read_lines(notes.sources)}
    with atomic_path(notes.previous) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for finding in notes.findings():
            source = sources.get(finding.source)
            if source and source.get("stamp"):
                file.write(json.dumps([source, to_json(finding)], ensure_ascii=False) + "\n")


def kept_findings(notes: Notes) -> dict[tuple[Any, ...], Finding]:
    """Findings kept by `keep_findings`, by the `content` of the sources."""
    if not notes.previous.is_file():
        return {}
    return {
        source_from_json(source).content: finding_from_json(finding) for source, finding in read_lines(notes.previous)
    }
