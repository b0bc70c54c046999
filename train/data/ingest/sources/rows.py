"""Rows of tables: CSV with any separator, JSON lines, JSON and YAML, also compressed by gzip, and Parquet."""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from megadit.models.shared.captions import caption_columns, file_columns, with_files
from megadit.models.shared.documents import MAX_BYTES, check_size, parse_loose_json, parse_toml, parse_yaml
from megadit.models.shared.errors import UserError
from megadit.models.shared.text_encoding import HEAD_BYTES, encoding_of, remedy
from megadit.train.data.ingest.sources.files import open_file
from megadit.train.data.ingest.sources.parquet import read_parquet
from megadit.train.data.ingest.sources.sniff import is_media_name

JSON = (".jsonl", ".ndjson", ".json")
YAML = (".yaml", ".yml")
TOML = ".toml"
TABLES = (".csv", ".tsv", *JSON, ".parquet", *YAML, TOML)
OTHER_TABLES = (".xlsx", ".xls", ".ods", ".feather", ".arrow", ".orc", ".avro", ".h5", ".sqlite", ".db", ".tfrecord")
"""Suffixes of tables that are not read."""
_GZIP = ".gz"
_MOST_UNFOLDED, _FREE_BYTES = 100, 1 << 26
"""Maximum bytes of a table for each byte of its compressed file, and in addition to these: a few kilobytes may hold
billions of empty lines."""
SEPARATORS = ",;\t|"
HEAD_CHARACTERS = 1 << 16
"""Characters of a file by which lines of JSON are told from a document."""
MAX_JSON_BYTES = 1 << 27
"""Maximum size of a table that is one JSON document, which is read whole; JSON lines have no limit."""
_BARE = ": "
"""Separators of lines without a header that quote nothing."""
_SEPARATOR_LINE = re.compile(r"sep=.\s*$", re.IGNORECASE)
"""The first line of a CSV for Excel."""
_NUMBER = re.compile(r"\s*(?:[-+]?[\d.]+(?:[eE][-+]?\d+)?)?\s*")
_CAPTION_NUMBER = re.compile(r"#\d+$")
"""The number of a caption that Flickr8k has after the name of a file."""
_SENTENCE = re.compile(r"[^\W\d_]\s+[^\W\d_]|[\u0370-\U0010ffff]")
"""Two words, or a letter of other scripts: no header, score or name of a split."""
_AROUND = frozenset("data dataset items samples clips videos images captions annotations results".split())
"""Keys of objects that hold all rows."""
_MISSING = frozenset(
    "#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|nan|null".split("|")
)
"""Values of a CSV that pandas, and so Hugging Face, reads as none."""
REST = "\0rest"
"""The column of what a row of a CSV has more than its header."""


def read_table(path: str, encoding: str | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a table, those without a column of files `with_files`.

    Raises:
        UserError: if it is none, or broken.
    """
    yield from map(with_files, _read_table(path, encoding))


def _read_table(path: str, encoding: str | None) -> Iterator[dict[str, Any]]:
    suffix = table_name(path).suffix
    try:
        if suffix == ".parquet":
            yield from read_parquet(path)
        elif suffix in (".csv", ".tsv", ".txt"):
            with open_text(path, encoding) as file:
                yield from _csv_rows(file, path)
        elif suffix in JSON and _has_lines(path, encoding, suffix):
            with open_text(path, encoding) as file:
                for number, line in enumerate(lines_of(file, path), 1):
                    if line.strip():
                        found = parse_loose_json(line, f"line {number} of {path}", is_finite=False)
                        pair = _turned_row(found)
                        rows = found if isinstance(found, list) and not pair else [pair or found]
                        yield from (_row(row, path) for row in rows)
        elif suffix in JSON:
            with open_text(path, encoding) as file:
                content = file.read(MAX_JSON_BYTES + 1)
            document = parse_loose_json(content, path, max_bytes=MAX_JSON_BYTES, is_finite=False)
            yield from (_row(row, path) for row in json_rows(document))
        elif suffix in (*YAML, TOML):
            with open_text(path, encoding) as file:
                text = file.read(MAX_BYTES + 1)
            document = parse_toml(text, path) if suffix == TOML else parse_yaml(text, path, is_text=True)
            yield from (_row(row, path) for row in json_rows(document))
        else:
            raise UserError(f"{path} is no table; give a name that ends in {', '.join(TABLES)}")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a table of files and captions: {', '.join(TABLES)}") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} cannot be read: it is not {error.encoding.upper()}{remedy(error.object, '--caption_encoding')}"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def table_name(name: str) -> PurePosixPath:
    """The name of a table in small letters, without the suffix of its compression."""
    return PurePosixPath(name.lower().removesuffix(_GZIP))


def open_text(path: str, encoding: str | None = None) -> io.TextIOWrapper:
    """A file as text, in the encoding that its first bytes say, or the one that was named; line ends as they are."""
    file = open_file(path)
    if path.lower().endswith(_GZIP):
        file = _Unzipped(file)
    name = encoding_of(file.read(HEAD_BYTES), encoding)
    file.seek(0)
    text = io.TextIOWrapper(file, encoding=name, newline="")
    if text.read(1) != "\ufeff":
        text.seek(0)
    return text


class _Unzipped(gzip.GzipFile):
    """A compressed file that is closed with its contents; reading raises OSError where it unfolds like no captions."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._compressed = file

    def read1(self, size: int = -1) -> bytes:
        content = super().read1(size)
        if self.tell() > _MOST_UNFOLDED * self._compressed.tell() + _FREE_BYTES:
            raise OSError(f"it decompresses to over {_MOST_UNFOLDED} times its size; no captions do")
        return content

    def close(self) -> None:
        super().close()
        self._compressed.close()


def _has_lines(path: str, encoding: str | None, suffix: str) -> bool:
    """Whether each line of a file is a JSON document, whatever its suffix says."""
    with open_text(path, encoding) as file:
        heads = [line.strip()[:2] for line in islice(filter(str.strip, file.read(HEAD_CHARACTERS).splitlines()), 2)]
    if suffix == ".json":
        return len(heads) == 2 and all(head[0] == "{" for head in heads)
    return not heads or (heads[0] != "{" and heads[0][0] != "[") or (len(heads) == 2 and {*heads} == {'["'})


def lines_of(file: io.TextIOBase, path: str) -> Iterator[str]:
    """The lines of a text that anybody may have written.

    Raises:
        UserError: for one that is too long: a file with holes is a single line of any length.
    """
    while line := file.readline(MAX_BYTES + 1):
        check_size(len(line), f"a line of {path}", MAX_BYTES)
        yield line


def _csv_rows(file: io.TextIOWrapper, path: str) -> Iterator[dict[str, Any]]:
    lines = lines_of(file, path)
    header = next((line for line in lines if line.strip() and not _is_before_header(line)), "")
    shapes = {each: found for each in SEPARATORS + _BARE if (found := _shape_of(header, each))}
    # a caption may have other separators, which leave a part of it with the name of the file
    delimiter = min(
        shapes, key=lambda each: len(shapes[each].row(_fields(header, each), each)["file_name"]), default=""
    )
    shape = shapes.get(delimiter)
    header = header if shape else header.removeprefix("#")
    delimiter = delimiter or max(SEPARATORS, key=lambda each: _likelihood(header, each))
    form = {
        "delimiter": delimiter,
        "strict": True,  # else a quote that is not closed takes in all rows after it
        # else blanks before a quote make it a part of the text
        "skipinitialspace": f'{delimiter} "' in header if shape else f"{delimiter} " in header,
        "quoting": csv.QUOTE_NONE if delimiter in _BARE else csv.QUOTE_MINIMAL,
    }
    rows = (
        csv.reader(chain([header], lines), **form)
        if shape
        else csv.DictReader(chain([header], lines), restkey=REST, **form)
    )
    first = 1 if shape else 2
    try:
        if shape:
            for fields in filter(None, rows):
                yield shape.row(fields, delimiter)
                first = rows.line_num + 1
            return
        names = tuple(rows.fieldnames or ())
        for name in (*caption_columns(names), *file_columns(names)):
            if names.count(name) > 1:
                raise UserError(f"{path} has {names.count(name)} columns {name!r}; rename all but one")
        for row in rows:
            if not any(row.get(REST, "x")):  # separators at the end of a line
                del row[REST]
            row |= dict.fromkeys((name for name in caption_columns(names) if row[name] in _MISSING), "")
            if REST in row and caption_columns(names) == names[-1:]:  # commas of a caption without quotes
                row[names[-1]] = delimiter.join([row[names[-1]], *row.pop(REST)])
            yield row
            first = rows.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path} cannot be read: in the row of line {first}: {error}; close each quote, and double those inside"
        ) from None


def _is_before_header(line: str) -> bool:
    """Whether a line names the separator, or is a comment."""
    is_comment = line.startswith("#") and not any(
        _shape_of(line, each) or _likelihood(line[1:], each)[0] for each in SEPARATORS
    )
    return is_comment or _SEPARATOR_LINE.match(line) is not None


@dataclass(frozen=True, slots=True)
class _Shape:
    """Rows without a header: a file and its caption, or a caption and its file, between numbers."""

    before: int
    """Columns of numbers before them, and after them."""
    after: int
    is_file_first: bool

    def row(self, fields: list[str], delimiter: str) -> dict[str, str]:
        """A caption without quotes may have separators in it."""
        inner = fields[self.before : len(fields) - self.after]
        name, texts = (inner[:1], inner[1:]) if self.is_file_first else (inner[-1:], inner[:-1])
        caption = delimiter.join(texts).strip()
        name = _CAPTION_NUMBER.sub("", "".join(name).strip())
        return {"file_name": name, "caption": "" if caption in _MISSING else caption}


def _fields(line: str, separator: str) -> list[str]:
    if separator in _BARE:
        return line.split(separator)
    try:
        return next(csv.reader([line.strip("\r\n")], delimiter=separator, skipinitialspace=True), [])
    except csv.Error:
        return []


def _shape_of(line: str, separator: str) -> _Shape | None:
    """The shape of rows of which this is the first line; None unless it has the name of a picture or video at one end,
    and a caption at the other."""
    fields = _fields(line, separator)
    ends = [number for number, field in enumerate(fields) if not _NUMBER.fullmatch(field)]
    if len(ends) < 2:
        return None
    for is_first in (True, False) if separator not in _BARE else (True,):
        shape = _Shape(ends[0], len(fields) - 1 - ends[-1], is_first)
        row = shape.row(fields, separator)
        if is_media_name(row["file_name"]) and _SENTENCE.search(row["caption"]):
            return shape
    return None


def _likelihood(header: str, separator: str) -> tuple[bool, int]:
    """Rank a column separator: whether it yields a column of files, and how many columns."""
    names = tuple(name.strip(' \r\n"') for name in header.split(separator))
    return bool(file_columns(names)), len(names)


def json_rows(document: Any) -> Iterator[Any]:
    """The rows in a document of JSON or YAML: a list, also inside an object, or of pairs; columns (also apart from
    rows, as pandas splits them), objects by the names of their files, or the pictures and annotations of COCO and
    MSR-VTT."""
    if isinstance(document, list):
        for row in document:
            yield _turned_row(row) or row
        return
    if not isinstance(document, dict):
        raise UserError("a table in JSON, YAML or TOML is a list of rows, or an object")
    for files, texts, key, name in (
        ("images", "annotations", "image_id", "file_name"),
        ("videos", "sentences", "video_id", "video_id"),
    ):
        if isinstance(document.get(files), list) and isinstance(document.get(texts), list):
            found = [each for each in document[files] if isinstance(each, dict)]
            by_id = {str(each[own]): each for own in ("id", key) for each in found if own in each}
            for each in document[texts]:
                if isinstance(each, dict) and "caption" in each and (about := by_id.get(str(each.get(key)))):
                    yield {"file_name": about.get(name), "caption": each.get("caption"), "split": about.get("split")}
            return
    if isinstance(document.get("columns"), list) and isinstance(document.get("data"), list):
        yield from (dict(zip(document["columns"], row, strict=False)) for row in document["data"])
        return
    if wrapped := next((value for key, value in document.items() if key in _AROUND and _has_rows(value)), None):
        yield from json_rows(wrapped)
        return
    lists = [value for value in document.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if lists:
        yield from next((rows for rows in lists if file_columns(tuple(rows[0]))), lists[0])
        return
    columns = [list(value.values()) if isinstance(value, dict) else value for value in document.values()]
    if file_columns(tuple(document)) and all(isinstance(each, list) for each in columns):  # as pandas writes them
        yield from (dict(zip(document, row, strict=True)) for row in zip(*columns, strict=False))
        return
    for name, value in document.items():
        if row := _turned_row((name, value)) if isinstance(value, str) else None:
            yield row
            continue
        is_text = isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))
        yield {"file_name": name} | (value if isinstance(value, dict) else {"caption": value} if is_text else {})


def _turned_row(row: Any) -> dict[str, Any] | None:
    """The row of a file and its caption, or of a caption and its file; None of anything else."""
    if not isinstance(row, list | tuple) or len(row) != 2 or not isinstance(row[0], str):
        return None
    if is_media_name(row[0]):
        return {"file_name": row[0], "caption": row[1]}
    is_turned = isinstance(row[1], str) and is_media_name(row[1]) and _SENTENCE.search(row[0])
    return {"file_name": row[1], "caption": row[0]} if is_turned else None


def _has_rows(value: Any) -> bool:
    """Whether an object has the names of files, or a list of objects."""
    return isinstance(value, dict) and (
        any(is_media_name(str(name)) for name in value)
        or any(isinstance(each, list) and each and isinstance(each[0], dict) for each in value.values())
    )


def _row(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{path} cannot be read: a line is {ascii(value)[:60]}, not an object of names and values")
    return value
