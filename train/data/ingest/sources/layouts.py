"""Layouts of captions in a folder: next to the files, in tables, and as in other projects.

| layout | of |
|---|---|
| `clip.mp4.json`, `clip.json`, `.yaml`, `.txt`, `.caption`, `clip.mp4.txt`, `clip.TXT` | megadit, kohya, musubi |
| `labels/clip.txt` for `videos/clip.mp4` (or captions, texts, prompts) | CogVideo |
| `prompt.txt` for `videos.txt`, line by line | finetrainers, CogVideo |
| `metadata.csv`, `.tsv`, `.jsonl`, `.json`, `.yaml`, `.parquet`, `.csv.gz` anywhere | Hugging Face, DiffSynth, kohya |
| the same in TOML, beside a file or for many | |
| any other table with captions whose rows name files that are there | LTX, musubi, Open-Sora, LLaVA, COCO, MSR-VTT |
| `captions.txt` as a CSV, or without a header a file and its caption in a line, or turned | Flickr8k |
| `*.toml` with `caption_extension`, and with folders of masks and conditions | kohya, musubi, diffusion-pipe |
"""

import os
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from megadit.models.shared.captions import (
    MAX_CAPTION_BYTES,
    caption_columns,
    captions_in,
    file_columns,
    files_of,
    is_blank,
    score_in,
    texts_of,
)
from megadit.models.shared.documents import check_plain_text, parse_loose_json, parse_toml, parse_yaml
from megadit.models.shared.errors import UserError
from megadit.models.shared.text_encoding import decoded
from megadit.train.data.ingest.sources.files import Folder, open_file, stem_of
from megadit.train.data.ingest.sources.listing import Reading
from megadit.train.data.ingest.sources.rows import TABLES, TOML, YAML, lines_of, open_text, read_table, table_name
from megadit.train.data.ingest.sources.sniff import NEVER, is_media_name
from megadit.train.dataset.places import is_url

METADATA = "metadata"
SIDE_SUFFIXES = (".json", ".txt", ".caption", *YAML, TOML)
SUBTITLES = (".srt", ".vtt", ".ass", ".ssa", ".sbv", ".lrc", ".ttml")
"""Suffixes of texts of which each line belongs to a part of a clip: no captions."""
_TREES = (".json", *YAML, TOML)
MEDIA_FOLDERS = frozenset("videos video images image clips media".split())
TEXT_FOLDERS = ("labels", "captions", "caption", "texts", "text", "prompts", "txt", "annotations")
FILE_LISTS = ("videos.txt", "images.txt", "video.txt", "image.txt", "files.txt")
TEXT_LISTS = ("prompts.txt", "prompt.txt", "captions.txt", "caption.txt", "texts.txt")
CONDITION_FOLDERS = ("control_directory", "conditioning_data_dir", "control_path", "mask_path")
"""Keys in `*.toml` of trainers: folders of pictures that go with those that are trained on."""
MOST_PROBED = 20
"""Number of rows by which it is decided whether a table names files of the folder."""
MOST_FOLDERS = 32
"""Folders of a prefix of all names of a table that are looked for."""
MOST_DOCUMENTS = 64
"""Documents of JSON or YAML of one folder that are opened to see whether they are tables."""
SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "validate", "dev", "eval"),
    "test": ("test", "testing"),
}
"""Split -> the names that its folder or table may have."""


@dataclass(frozen=True, slots=True)
class Table:
    """Table of files and captions."""

    path: str
    name: str
    """Name relative to the folder; of a table elsewhere the path as the user wrote it."""
    base: str = ""
    """Folder of the table, with a slash at its end."""
    file_list: str | None = None
    """File that names the files, where captions are in a second one, `path`, line by line."""

    def rows(self, encoding: str | None = None) -> Iterator[dict[str, Any]]:
        """Raises UserError for a table that is broken."""
        if self.file_list is None:
            yield from read_table(self.path, encoding)
            return
        with open_text(self.file_list, encoding) as files, open_text(self.path, encoding) as texts:
            lines = lines_of(files, self.file_list), lines_of(texts, self.path)
            for number, (file, text) in enumerate(zip_longest(*lines), 1):
                if file is None or text is None:
                    raise UserError(
                        f"{self.file_list} and {self.path} must have equally many lines; one ends after {number - 1}"
                    )
                yield {"file_name": file.strip(), "caption": text.strip()}


def split_of(name: str, is_file: bool = False) -> str | None:
    """The split that the name of a folder, or a word of a table's name, denotes."""
    words = set(PurePosixPath(name).stem.lower().replace("-", "_").split("_")) if is_file else {name.lower()}
    return next((split for split, names in SPLITS.items() if words & set(names)), None)


# --- tables -------------------------------------------------------------------------------------------------------


def find_tables(folder: Folder, split: str, reading: Reading) -> list[Table]:
    """Tables of captions in a folder, without those of other splits; `metadata` first."""
    metadata, others, documents = [], [], {}
    for name in folder.names():
        path = PurePosixPath(name)
        if table_name(name).suffix not in TABLES and path.name.lower() not in TEXT_LISTS:
            continue
        stem = name.removesuffix(path.suffix)
        if path.suffix.lower() in SIDE_SUFFIXES and (stem in folder or _is_of_media(folder, stem)):
            continue  # it is the caption of a single file
        table = _table(folder, name)
        if table_name(name).stem == METADATA and (path.suffix.lower() not in _TREES or _names_files(folder, table)):
            metadata.append(table)
            continue
        if split_of(name, is_file=True) not in (None, split):
            continue
        documents[path.parent] = documents.get(path.parent, 0) + (path.suffix.lower() in _TREES)
        if documents[path.parent] <= MOST_DOCUMENTS and _is_of_captions(folder, table, reading):
            others.append(table)
    return [*metadata, *_lists(folder), *others]


def _is_of_media(folder: Folder, whole: str) -> bool:
    """Whether a picture or video has this name before its suffix."""
    stem = whole[whole.rfind("/") + 1 :]
    return any(each.rpartition(".")[0] == whole and is_media_name(each) for each in folder.called(stem))


def named_table(folder: Folder, path: str) -> Table:
    """The table that a user named."""
    inner = path.removeprefix(f"{folder.root}/")
    if inner != path and inner in folder:
        return _table(folder, inner)
    return Table(path, path)


def _table(folder: Folder, name: str) -> Table:
    return Table(folder.path(name), name, name[: name.rfind("/") + 1])


def _lists(folder: Folder) -> Iterator[Table]:
    for name in FILE_LISTS:
        for files in folder.called(stem_of(name)):
            base = files.removesuffix(name)
            texts = next((base + each for each in TEXT_LISTS if base + each in folder), None)
            if texts and base != files:
                yield Table(folder.path(texts), texts, base, folder.path(files))


def _names_files(folder: Folder, table: Table) -> bool:
    """Whether a table that is called `metadata` names any file, there or not, or is broken: it may be about the folder
    as a whole."""
    resolver = Resolver(folder, table.base)
    try:
        rows = list(islice(table.rows(), MOST_PROBED))
    except (UserError, ValueError):
        return True
    named = (name for row in rows for column in file_columns(tuple(row)) for name in files_of(row[column]))
    return any(is_media_name(name) or resolver.resolve(name) for name in named)


def _is_of_captions(folder: Folder, table: Table, reading: Reading) -> bool:
    """Whether a table names files and has captions: one of sizes or scores must not hide captions beside the files."""
    try:
        rows = list(islice(table.rows(reading.caption_encoding), MOST_PROBED))
        resolver = resolver_of(folder, table, rows)
        for row in rows:
            if not any(row.get(column) for column in reading.columns or caption_columns(tuple(row))):
                continue
            named = (name for column in file_columns(tuple(row)) for name in files_of(row[column]))
            found = filter(None, map(resolver.resolve, named))
            if any(PurePosixPath(name).suffix.lower() not in NEVER for name in found):
                return True
    except (UserError, ValueError):
        return False
    return False


def resolver_of(folder: Folder, table: Table, rows: Sequence[dict[str, Any]]) -> "Resolver":
    """The resolver of a table's names, whose first `rows` say whether they begin elsewhere."""
    resolver = Resolver(folder, table.base)
    resolver.find_prefix(
        [name for row in rows for column in file_columns(tuple(row)) for name in files_of(row[column])]
    )
    return resolver


class Resolver:
    """Files by their possible names in rows: relative to the table, to the source, as whole path, without suffix,
    as in a URL."""

    def __init__(self, folder: Folder, base: str) -> None:
        self._folder, self._base = folder, base
        if base and not any(is_media_name(name) for name in folder.under(base)):
            self._base = ""  # a folder of tables alone, whose files lie elsewhere, as OpenVid's
        self.prefix = ""
        """Folder with which all names begin, on the machine or in the folder where the table was written."""

    def find_prefix(self, names: Sequence[str]) -> None:
        """Find the `prefix` without which most of the names are files of the folder, if none is with it: relative to
        the table, or to the folder."""
        inner = [name for name in map(self._inner, names) if not is_url(name)]
        if any(map(self.resolve, inner)):
            return
        common = os.path.commonprefix([name.split("/")[:-1] for name in inner])[:MOST_FOLDERS]
        most = 0
        for base in dict.fromkeys(("", self._base)):
            other = Resolver(self._folder, base)
            for prefix in ("/".join(common[:length]) + "/" for length in range(1, len(common) + 1)):
                found = set(map(other.resolve, (name.removeprefix(prefix) for name in inner))) - {None}
                if len(found) > most:
                    most, self.prefix, self._base = len(found), prefix, base

    def resolve(self, name: str) -> str | None:
        """The name of the file in the folder; None if there is none, or it is not clear which."""
        written = (name, unquote(name)) if "%" in name else (name,)
        forms = (form for each in written for form in forms_of(self._inner(each)))
        return next(filter(None, map(self._resolve, forms)), None)

    def _resolve(self, name: str) -> str | None:
        for inner in (self._base + name, name):
            if known := self._folder.known(inner):
                return known
        if not self._folder.holds(name):
            return None
        return self._of_its_name(name) or self._without_suffix(name)

    def resolve_folder(self, name: str) -> str | None:
        """The name of a folder inside of the source, with a slash at its end; None if it has no files."""
        inner = self._inner(f"{name.rstrip('/')}/")
        return next((each for each in (self._base + inner, inner) if inner and any(self._folder.under(each))), None)

    def why_not(self, name: str) -> str:
        """The reason for a name that is none of a file; "" where the folder gives one itself."""
        inner = self._inner(name)
        if is_url(inner):
            return "URL, not fetched (save the table as Parquet for `megadit prepare hf`)"
        if not self._folder.holds(inner):
            return "outside the source folder"
        is_there = any(each in self._folder.not_used for each in (self._base + inner, inner))
        return "" if is_there else "missing file"

    def _inner(self, name: str) -> str:
        name = name.strip().removeprefix("file://").replace("\\", "/")
        for root in self._folder.roots:
            name = name.removeprefix(f"{root}/")
        while name.startswith("./"):
            name = name[2:]
        return name.removeprefix(self.prefix)

    def _of_its_name(self, name: str) -> str | None:
        tail = f"/{name}"
        called = self._folder.called(stem_of(name))
        return _only(each for each in called if each.endswith(tail) and each.startswith(self._base))

    def _without_suffix(self, name: str) -> str | None:
        folder, _, stem = name.rpartition("/")
        called = (each for each in self._folder.called(stem) if is_media_name(each))
        return _only(each for each in called if not folder or each.rpartition("/")[0].endswith(folder))


def forms_of(name: str) -> tuple[str, ...]:
    """A name as it is written; with its accents composed and apart, as macOS has them in names of files; and with its
    suffix in small letters and in capitals, as cameras have it."""
    accents = (name, *(unicodedata.normalize(form, name) for form in ("NFC", "NFD") if not name.isascii()))
    parts = [each.rpartition(".") for each in accents]
    return (*accents, *(f"{stem}{dot}{end}" for stem, dot, suffix in parts for end in (suffix.lower(), suffix.upper())))


def _only(names: Iterable[str]) -> str | None:
    """The first of one."""
    found = list(islice(names, 2))
    return found[0] if len(found) == 1 else None


# --- captions next to files ---------------------------------------------------------------------------------------


def caption_files(folder: Folder, name: str, extensions: Sequence[str] = ()) -> list[str]:
    """The files that may hold the caption of one, the first one first."""
    path = PurePosixPath(name)
    stem = str(path.with_suffix(""))
    suffixes = (*extensions, *SIDE_SUFFIXES)
    names = [f"{name}.json", *(stem + suffix for suffix in suffixes), *(name + suffix for suffix in suffixes)]
    if path.parent.name.lower() in MEDIA_FOLDERS:
        parent = path.parent.parent
        names += [str(parent / texts / f"{path.stem}{suffix}") for texts in TEXT_FOLDERS for suffix in suffixes]
    names = [form for each in names for form in forms_of(each)]
    return [each for each in dict.fromkeys(names) if each in folder]


def caption_of(name: str, content: bytes, reading: Reading) -> tuple[tuple[str, ...], float | None]:
    """Captions and score in a file next to an image or video.

    Raises:
        ValueError: if it is broken, or of another encoding.
    """
    check_plain_text(content)
    text = decoded(content, reading.caption_encoding, "--caption_encoding").strip()
    suffix = PurePosixPath(name).suffix.lower()
    if suffix in YAML:
        values = parse_yaml(text, "it", is_text=True)
    elif suffix == TOML:
        values = parse_toml(text, "it")
    elif suffix == ".json":
        values = parse_loose_json(text, "it", is_finite=False) if text else {}
    else:
        text.encode()
        return (() if is_blank(text) else (text,)), None
    if isinstance(values, dict):
        columns = tuple(column for column in reading.columns if column in values)
        return captions_in(values, columns) or (), score_in(values)
    captions = tuple(dict.fromkeys(texts_of(values))) if _is_texts(values) else ()
    "".join(captions).encode()
    return captions, None


def _is_texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str | dict) for each in value))


@dataclass(frozen=True, slots=True)
class Trainers:
    """Settings in `*.toml` of trainers, of the files of a folder."""

    names: tuple[str, ...]
    """The documents with such settings; others are left alone."""
    extensions: tuple[str, ...]
    """Suffixes of captions."""
    conditions: tuple[str, ...]
    """Folders of masks and conditions, with a slash at their ends."""


def read_trainers(folder: Folder) -> Trainers:
    names, extensions, conditions = {}, {}, {}
    for name in folder.names():
        if not name.endswith(".toml"):
            continue
        with open_file(folder.path(name)) as file:
            try:
                document = parse_toml(file.read(MAX_CAPTION_BYTES).decode(), name)
            except ValueError:
                continue
        resolver = Resolver(folder, name[: name.rfind("/") + 1])
        for part in _dicts_in(document):
            if isinstance(suffix := part.get("caption_extension"), str) and suffix.strip("."):
                names[name] = extensions[f".{suffix.strip('. ')}"] = None
            for key in CONDITION_FOLDERS:
                if isinstance(path := part.get(key), str) and (found := resolver.resolve_folder(path)):
                    names[name] = conditions[found] = None
    return Trainers(tuple(names), tuple(extensions), tuple(conditions))


def _dicts_in(document: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    if depth < 5 and isinstance(document, dict):
        yield document
        for value in document.values():
            yield from _dicts_in(value, depth + 1)
    elif depth < 5 and isinstance(document, list):
        for value in document:
            yield from _dicts_in(value, depth + 1)
