"""Videos and images in a folder, each with its captions (`webdataset`: in tar files, `tables`: in Parquet files).

The order of sources depends on their names alone. Names inside tables are names and nothing more: only files that were
found in the folder are opened.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any

from megadit.models.shared.captions import (
    CAPTION_COLUMNS,
    FILE_COLUMNS,
    MAX_CAPTION_BYTES,
    caption_columns,
    captions_in,
    check_columns,
    file_columns,
    files_of,
    score_in,
    span_of,
)
from megadit.models.shared.errors import UserError
from megadit.models.shared.progress import Progress
from megadit.models.shared.text_encoding import remedy
from megadit.train.data.ingest.lines import LongList
from megadit.train.data.ingest.plan import Kind, Skip, Source
from megadit.train.data.ingest.sources.files import Folder, open_file, open_folder, stem_of
from megadit.train.data.ingest.sources.layouts import (
    METADATA,
    MOST_PROBED,
    SIDE_SUFFIXES,
    SUBTITLES,
    Resolver,
    Table,
    caption_files,
    caption_of,
    find_tables,
    named_table,
    read_trainers,
    resolver_of,
    split_of,
)
from megadit.train.data.ingest.sources.listing import Listing, Reading, as_text, stamp_of
from megadit.train.data.ingest.sources.rows import OTHER_TABLES, REST, TABLES, open_text, table_name
from megadit.train.data.ingest.sources.sniff import HEAD_BYTES, SUFFIXES, is_media_name, kinds_of
from megadit.train.dataset.places import is_url

LABELS = ("labels.txt", "words.txt", "LOC_synset_mapping.txt")
"""Files with lines of a folder's name and its label, as ImageNet has them."""
MAX_LABEL_CHARACTERS = 1 << 24
BY_FOLDER = "folders"
"""Value in place of a table of captions: the name of a picture's folder is its label."""
MOVED = "table whose paths begin elsewhere: what follows was found in this folder"
MOVES = "picture that moves, its first frame is used (megadit prepare videos uses every frame)"
NEW, LEFT_OUT, READ = -1, -2, -3
"""States of a file that is not a source: not read yet; a source that is left out; a file of captions."""
SEVERAL = -1
"""Replaces the hash of a span where rows describe several spans of a source, which has no captions then."""
MASKS = ("-masklabel", "-condlabel")
"""Ends of names, before the suffix, of pictures that OneTrainer keeps beside those it trains on."""
_NUMBERED = re.compile(r"\d+[_.] *(?=\D)")
"""The number of repeats, or of the class, that the folders of kohya's scripts and of CUB-200 begin with."""
QUIET_ROWS = 50_000
"""Rows of a table that are read before progress is shown."""


def list_folder(
    root: str | Path,
    kind: Kind,
    table: str | None = None,
    *,
    reading: Reading = Reading(),  # noqa: B008  (it is frozen)
    split: str = "train",
    without: str | Path | None = None,
) -> Listing:
    """List files under `root`, except those under `without`, with their captions.

    Captions come from a table (`table`, or those found), from a file next to each (`layouts`), or (with `folders` as
    table) from the name of the folder, which one of `LABELS` may translate. Folders of other splits are not used.

    Raises:
        UserError: if there is no such folder, nothing in it to use, or a table has no column of files or captions.
    """
    folder = open_folder(root, follow_links=reading.follow_links, without=without)
    if folder is None:
        is_missing = not is_url(root) and not Path(root).exists()
        raise UserError(f"{root} {'does not exist' if is_missing else 'is not a folder'}; give a folder of {kind}s")
    listing = _Lister(folder, kind, reading, split).listing_with(table)
    if not listing.sources:
        why = listing.why_empty()
        raise UserError(
            f"{root} holds no {kind}s to use: {why}"
            if why
            else f"{root} holds no {kind}s ({', '.join(SUFFIXES[kind])})"
        )
    return listing.sorted()


def kinds_in(folder: Folder, name: str) -> tuple[Kind, ...]:
    """Kinds that a file can be read as, by its name, or by its first bytes where the name says too little."""
    return kinds_of(name, lambda: _beginning(folder.path(name), HEAD_BYTES))


@dataclass
class _Lister:
    """Lists one folder."""

    folder: Folder
    kind: Kind
    reading: Reading
    split: str
    listing: Listing = field(default_factory=Listing)
    _last_asked: array = field(init=False)
    """Use of each of the folder's names, in their order: a number in the listing, or `NEW`, `LEFT_OUT` or `READ`."""
    _spans: array = field(default_factory=lambda: array("q"))
    """The span that the captions of each source describe, as a hash; 0: not stated."""
    _more: LongList[Sequence] = field(default_factory=lambda: LongList(tuple, itemgetter(0)))
    """(Number, caption, ...) of further rows of a source: added to it one by one, they would take quadratic time."""
    _moving: set[str] = field(default_factory=set)
    """Pictures of several frames."""
    _scopes: dict[str, str] = field(default_factory=dict)
    """Folder of which a table names the files -> that table."""

    def __post_init__(self) -> None:
        self._last_asked = array("i", [NEW]) * len(self.folder.names())

    def _rank_of(self, name: str) -> int:
        return self._last_asked[self.folder.place(name)]

    def _mark(self, name: str, use: int) -> None:
        if (place := self.folder.place(name)) is not None:
            self._last_asked[place] = use

    def listing_with(self, table: str | None) -> Listing:
        labels = self._labels() if table == BY_FOLDER else None
        others = self._other_splits()
        if labels is None:
            found = [named_table(self.folder, table)] if table else self._found_tables()
            for each in found:
                if each.base.partition("/")[0] not in others:
                    self._read_table(each, is_named=table is not None)
            self._add_more_captions()
        trainers = read_trainers(self.folder)
        for name in trainers.names:
            self._mark(name, READ)
        for name in self.folder.names():
            if self._rank_of(name) != NEW or name.partition("/")[0] in others:
                continue
            if not self._is_of_kind(name):
                continue
            if stem_of(name).endswith(MASKS) or name.startswith(trainers.conditions):
                self._mark(name, LEFT_OUT)
                self.listing.pass_over(name, "mask or condition of another picture")
            elif (scope := self._scope_of(name)) is not None:
                self._mark(name, LEFT_OUT)
                self.listing.pass_over(name, f"not named by {scope}")
            elif labels is not None:
                self._add(name, (_label(labels, name),))
            else:
                self._add_with_side_caption(name, trainers.extensions)
        self._account(others)
        return self.listing

    def _found_tables(self) -> list[Table]:
        return find_tables(self.folder, self.split, self.reading)

    def _add(self, name: str, captions: tuple[str, ...], score: float | None = None, span: int = 0) -> None:
        path = self.folder.path(name)
        number = self.listing.add(
            Source(
                name=name,
                kind=self.kind,
                path=path,
                caption=captions[0] if captions else "",
                more_captions=captions[1:],
                aesthetic_score=score,
                stamp=stamp_of(path),
            )
        )
        self._mark(name, LEFT_OUT if number is None else number)
        if number is not None:
            self._spans.append(span)
        if name in self._moving:
            self.listing.remarks.append(Skip(source=name, reason=MOVES, detail=""))

    def _leave_out(self, name: str, trouble: str) -> None:
        self._mark(name, LEFT_OUT)
        self.listing.skip(name, "unreadable caption", trouble)

    def _is_of_kind(self, name: str) -> bool:
        kinds = kinds_in(self.folder, name)
        if self.kind == "image" and kinds == ("video", "image") and not name.lower().endswith(".gif"):
            self._moving.add(name)  # a GIF that is listed as both shows one frame
        return self.kind in kinds

    # --- tables

    def _read_table(self, table: Table, *, is_named: bool) -> None:
        asked, rows = self.reading.columns, _with_messages(table.rows(self.reading.caption_encoding), table.name)
        probed = list(islice(rows, MOST_PROBED))
        resolver = resolver_of(self.folder, table, probed)
        columns: dict[str, None] = {}
        has_captions, first, inside, short = False, len(self.listing.sources), True, PurePosixPath(table.name).name
        must_be_one = is_named or PurePosixPath(table.name).stem.lower() == METADATA
        for number, row in enumerate(chain(probed, rows)):
            columns |= dict.fromkeys(each for each in row if each != REST)
            files = file_columns(tuple(row))
            if not files and must_be_one:
                raise UserError(_lacks(table, "files", FILE_COLUMNS, row))
            has_captions |= bool(asked or caption_columns(tuple(row)))
            place = f"row {number} of {short}"
            name = self._named_by(row, files, place, resolver)
            if name is not None and self._take_row(name, row, place, first):
                inside = inside and name.startswith(table.base)
        if asked:
            check_columns(asked, columns, f"{table.name} has")
        if not columns and must_be_one:
            raise UserError(f"{table.path} has no rows below its header; write one for each file, or remove the table")
        if not has_captions and must_be_one:
            raise UserError(_lacks(table, "captions", CAPTION_COLUMNS, columns))
        if resolver.prefix:
            self.listing.remarks.append(Skip(source=table.name, reason=MOVED, detail=resolver.prefix))
        self._mark(table.name, READ)
        if table.file_list:
            self._mark(table.file_list.removeprefix(f"{self.folder.root}/"), READ)
        self._scopes.setdefault(table.base if inside else "", short)

    def _named_by(self, row: dict[str, Any], files: Iterable[str], place: str, resolver: Resolver) -> str | None:
        """The file of this kind that a row names."""
        columns = [names for column in self._in_order(files) if (names := files_of(row.get(column)))]
        said = [names[0] for names in columns if len(names) == 1]
        if not said:
            self.listing.skip(place, "row of several files" if columns else "row without a file")
            return None
        found = [name for name in map(resolver.resolve, said) if name]
        if not found and (reason := resolver.why_not(said[0])):
            self.listing.skip(said[0], reason, place)
        return next(filter(self._is_of_kind, found), None)

    def _take_row(self, name: str, row: dict[str, Any], place: str, first: int) -> bool:
        """Whether it is this table that gives the file its captions; `first` is the number of its first source."""
        use = self._rank_of(name)
        is_new = use == NEW
        if not is_new and use < first:
            return False
        if is_new and (other := split_of(str(row.get("split")))) not in (None, self.split):
            self._mark(name, LEFT_OUT)
            self.listing.pass_over(name, f"of the split {other} (--split)")
            return True
        try:
            if REST in row:
                raise ValueError("it has more columns than the header: quote what has separators in it")
            captions, score = captions_in(row, self.reading.columns) or (), score_in(row)
        except ValueError as error:
            if is_new:
                self._leave_out(name, f"{place}: {error}")
            return True
        span = hash(span_of(row)) & (1 << 62) - 1
        if is_new:
            self._add(name, captions, score, span)
        elif captions:
            if span and self._spans[use] not in (0, span):
                self._spans[use] = SEVERAL
            self._more.append((use, *captions))
        return True

    def _add_more_captions(self) -> None:
        """Give the sources the captions of `_more`."""
        self._more.sort()
        for use, rows in groupby(self._more, itemgetter(0)):
            source = self.listing.sources[use]
            every = dict.fromkeys(chain(source.captions, *(captions for _, *captions in rows)))
            caption, *more = [""] if self._spans[use] == SEVERAL else every
            self.listing.sources[use] = replace(source, caption=caption, more_captions=tuple(more))

    def _in_order(self, files: Iterable[str]) -> list[str]:
        """Sort columns of files: those of this kind first."""
        return sorted(files, key=lambda column: self.kind not in column.lower())

    def _scope_of(self, name: str) -> str | None:
        """The table that names other files of the same folder, or of one above it."""
        if not self._scopes:
            return None
        parents = (f"{each}/" if str(each) != "." else "" for each in PurePosixPath(name).parents)
        return next((self._scopes[parent] for parent in parents if parent in self._scopes), None)

    # --- captions next to files

    def _add_with_side_caption(self, name: str, suffixes: tuple[str, ...]) -> None:
        captions, score, trouble = (), None, ""
        for side in caption_files(self.folder, name, suffixes):
            if captions:
                break
            try:
                captions, found = caption_of(side, _beginning(self.folder.path(side)), self.reading)
            except (OSError, ValueError) as error:
                trouble = trouble or f"{PurePosixPath(side).name}: {error}"
                found = None
            score = found if score is None else score
            self._mark(side, READ)
        if trouble and not captions:
            self._leave_out(name, trouble)
        else:
            self._add(name, captions, score)

    # --- folders

    def _labels(self) -> dict[str, str]:
        """Folder's name -> words."""
        path = next(filter(None, map(self.folder.path, LABELS)), None)
        if path is None:
            folders = {PurePosixPath(name).parent.name for name in self.folder.names() if is_media_name(name)}
            are_numbered = all(map(_NUMBERED.match, folders))
            return {name: _NUMBERED.sub("", name).replace("_", " ") for name in folders} if are_numbered else {}
        for name in (name for name in LABELS if self.folder.path(name) == path):
            self._mark(name, READ)
        try:
            with open_text(path, self.reading.caption_encoding) as file:
                lines = file.read(MAX_LABEL_CHARACTERS).splitlines()
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8{remedy(error.object, '--caption_encoding')}") from None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        return {
            name: words for name, _, words in (line.partition("\t" if "\t" in line else " ") for line in lines) if words
        }

    def _other_splits(self) -> dict[str, str]:
        """Folders at the top that are other splits, where all of them are splits -> the split."""
        tops = {name.partition("/")[0] for name in self.folder.names() if "/" in name}
        splits = {top: split_of(top) for top in tops}
        if self.split not in splits.values() or None in splits.values():
            return {}
        return {top: split for top, split in splits.items() if split != self.split}

    # --- what is left

    def _account(self, others: dict[str, str]) -> None:
        """Record all files that are neither sources nor captions."""
        for name, reason in self.folder.not_used.items():
            self.listing.pass_over(name, reason)
        for name in self.folder.names():
            if self._rank_of(name) == NEW:
                other = others.get(name.partition("/")[0])
                self.listing.pass_over(name, f"of the split {other} (--split)" if other else self._why_not(name))

    def _why_not(self, name: str) -> str:
        suffix = PurePosixPath(name).suffix.lower()
        other: Kind = "image" if self.kind == "video" else "video"
        if other in kinds_in(self.folder, name):
            return f"{other} (megadit prepare {other}s)"
        if table_name(name).suffix in TABLES:
            return f"{suffix} of no {self.kind}, or without captions"
        if suffix in SIDE_SUFFIXES:
            return f"{suffix} of no {self.kind}, or beside another caption of it"
        if suffix in SUBTITLES:
            return f"{suffix}, whose lines are of parts of a clip (write what the whole of it shows in a .txt)"
        if suffix in OTHER_TABLES:
            return f"{suffix} (a table is read as {', '.join(TABLES)}, or these with .gz)"
        return suffix or "file without a suffix"


def _with_messages(rows: Iterable[dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    """The rows, with a line that says how many were read where these are many."""
    rows = iter(rows)
    yield from islice(rows, QUIET_ROWS)
    first = next(rows, None)
    if first is None:
        return
    with Progress(0, f"listing {name}", completed=QUIET_ROWS) as bar:
        for row in chain([first], rows):
            bar.total = bar.completed + 1
            bar.advance()
            yield row


def _lacks(table: Table, what: str, names: Iterable[str], row: Mapping[str, Any]) -> str:
    found = ", ".join(str(each) for each in row if each != REST)
    if what == "files" and any(is_url(str(value)) for value in row.values()):
        return f"{table.path} has URLs, not files: save it as Parquet, and `megadit prepare hf` fetches them"
    return f"{table.path} has no column of {what}; name it one of {', '.join(names)}; it has {ascii(found)[1:-1][:200]}"


def _label(labels: dict[str, str], name: str) -> str:
    label = PurePosixPath(name).parent.name
    return as_text(labels.get(label, label.replace("_", " ")).strip())


def _beginning(path: str, size: int = MAX_CAPTION_BYTES) -> bytes:
    try:
        with open_file(path) as file:
            return file.read(size)
    except OSError:
        if size == HEAD_BYTES:
            return b""
        raise
