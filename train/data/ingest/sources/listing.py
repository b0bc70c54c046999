"""Result of listing a location: the sources, and everything else with the reason."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from megadit.models.shared.captions import shortened
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.text_encoding import check_encoding
from megadit.train.data.ingest.lines import LongList
from megadit.train.data.ingest.plan import Skip, Source, skip_from_json, source_from_json
from megadit.train.dataset.places import is_url


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Choice of a source's files and reading of its captions."""

    caption_columns: str | None = setting(
        None,
        "columns or keys of captions; several, as in caption,caption_short, give a clip as many (default: usual names)",
        names=("--caption_columns", "--caption_column"),
        metavar="NAMES",
    )
    caption_encoding: str | None = setting(
        None, "encoding of captions that are not UTF-8: cp1252, gb18030", metavar="NAME"
    )
    follow_links: bool = setting(False, "also read links to files outside of the folder")

    def __post_init__(self) -> None:
        check_encoding(self.caption_encoding)

    @property
    def columns(self) -> tuple[str, ...]:
        """() where none were asked for."""
        return tuple(filter(None, (name.strip() for name in (self.caption_columns or "").split(","))))


@dataclass(slots=True)
class Listing:
    """Listing of a location: every file is in one of the first three lists, which are on disk."""

    sources: LongList[Source] = field(default_factory=lambda: LongList(source_from_json, lambda source: source.name))
    skips: LongList[Skip] = field(default_factory=lambda: LongList(skip_from_json))
    """Sources that are left out before they are read."""
    not_used: LongList[Skip] = field(default_factory=lambda: LongList(skip_from_json))
    """Files that are neither sources nor captions of any."""
    remarks: LongList[Skip] = field(default_factory=lambda: LongList(skip_from_json))
    """Changes made to sources that are used."""

    def add(self, source: Source) -> int | None:
        """Notes a source and returns its number, or leaves it out for a name that is no text, which no file of ours can
        hold."""
        if as_text(source.name) != source.name or as_text(source.path) != source.path:
            self.skip(source.name, "unreadable name")
            return None
        self.sources.append(source)
        return len(self.sources) - 1

    def skip(self, name: str, reason: str, detail: str = "") -> None:
        self.skips.append(Skip(source=as_text(name), reason=reason, detail=as_text(detail)))

    def pass_over(self, name: str, reason: str, detail: str = "") -> None:
        self.not_used.append(Skip(source=as_text(name), reason=reason, detail=as_text(detail)))

    def sorted(self) -> "Listing":
        """Sorts the sources by name; everything else stays in the order in which it was found."""
        self.sources.sort()
        return self

    def why_empty(self) -> str:
        """The reasons for which there is no source, the commonest first, with an example; "": nothing was found."""
        counts = Counter(skip.reason for skip in chain(self.skips, self.not_used)).most_common()
        if not counts:
            return ""
        first = next(skip for skip in chain(self.skips, self.not_used) if skip.reason == counts[0][0])
        detail = f": {first.detail}" if first.detail else ""
        return f"{counted(counts)}; {first.source} first{detail}"


MOST_CAPTIONS = 64
"""Captions of a source, of each of which its samples store features."""


def shorten_captions(listing: Listing, most_words: int) -> None:
    """Cut captions longer than `most_words`, and leave out those after `MOST_CAPTIONS`, and record it."""
    for number, source in enumerate(listing.sources):
        if (count := len(source.captions)) > MOST_CAPTIONS:
            source = replace(source, more_captions=source.captions[1:MOST_CAPTIONS])
            listing.sources[number] = source
            reason = f"source with more than {MOST_CAPTIONS} captions, of which these are used"
            listing.remarks.append(Skip(source=source.name, reason=reason, detail=f"{count:,} captions"))
        if all(len(text) <= most_words for text in source.captions):
            continue  # so many letters are no more words
        cut = tuple(shortened(text, most_words) for text in source.captions)
        if cut != source.captions:
            listing.sources[number] = replace(source, caption=cut[0], more_captions=cut[1:])
            words = max(len(text.split()) for text in source.captions)
            reason = f"caption cut to {most_words:,} words (--max_caption_words)"
            listing.remarks.append(Skip(source=source.name, reason=reason, detail=f"{words:,} words"))


def counted(counts: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{count:,} x {reason}" for reason, count in counts)


def as_text(name: str) -> str:
    """The name with the bytes that are not UTF-8 written out."""
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


def stamp_of(path: str) -> str:
    """Size and time of a file on disk; "" of one in a store."""
    if is_url(path):
        return ""
    try:
        about = os.stat(path)
    except OSError:
        return ""
    return f"{about.st_size} {about.st_mtime_ns}"
