"""Where videos and images come from: folders and WebDataset shards (`tables`: those of a Hugging Face data set).

Each listing gives `Source`s, in an order that depends on their names alone, and `Skip`s for what it cannot use. Names
inside archives and tables are names and nothing more: no path is made from them.
"""

import csv
import math
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import UserError
from megadit.train.data.dataset_info import INFO_FILE
from megadit.train.data.ingest import animations
from megadit.train.data.ingest.files import Folder, file_size, open_file, open_folder, open_text
from megadit.train.data.ingest.plan import Kind, Skip, Source
from megadit.train.data.places import is_url
from megadit.train.data.tar_files import ForeignTarFile

SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "video": tuple(".mp4 .m4v .mov .mkv .webm .avi .mpg .mpeg .ts .flv .ogv .wmv .gif".split()),
    "image": tuple(".jpg .jpeg .png .webp .bmp .tif .tiff .ppm".split()),
}
TABLES = (".csv", ".jsonl", ".parquet")
FILE_COLUMNS = ("file_name", "path", "file", "video", "image", "video_path", "image_path")
CAPTION_COLUMNS = ("caption", "text", "prompt", "name")
MAX_CAPTION_BYTES = 1 << 20
LABELS = ("labels.txt", "words.txt", "LOC_synset_mapping.txt")
"""Lines of a folder's name and the words that stand for it, as beside ImageNet."""
MAX_LABEL_CHARACTERS = 1 << 24
ORIGINALS = "originals"
"""The folder of a data set where `megadit prepare --originals` keeps them."""
BY_FOLDER = "folders"
"""In place of a table of captions: the name of a picture's folder is its label."""


@dataclass(slots=True)
class Listing:
    """What was found."""

    sources: list[Source] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)

    def add(self, source: Source) -> None:
        """Notes a source, or leaves it out for a name that is no text, which no file of ours can hold."""
        if _as_text(source.name) == source.name and _as_text(source.path) == source.path:
            self.sources.append(source)
        else:
            self.skip(source.name, "unreadable name")

    def skip(self, name: str, reason: str, detail: str = "") -> None:
        self.skips.append(Skip(source=_as_text(name), reason=reason, detail=_as_text(detail)))

    def sorted(self) -> "Listing":
        return Listing(
            sorted(self.sources, key=lambda s: s.name), sorted(self.skips, key=lambda s: (s.source, s.detail))
        )


def _as_text(name: str) -> str:
    """The name with the bytes that are not UTF-8 written out."""
    return name.encode("utf-8", "backslashreplace").decode()


# --- folders ------------------------------------------------------------------------------------------------------


def list_folder(root: str | Path, kind: Kind, table: str | None = None) -> Listing:
    """Files under `root`, captioned by a table (`metadata.csv`, `.jsonl` or `.parquet`, or the one given), by
    `clip.mp4.json` (as `megadit generate` writes it), `clip.json` or `clip.txt` beside `clip.mp4`, or (with `folders`
    for a table) by the folder that each lies in, for whose name one of `LABELS` may give other words.

    Raises:
        UserError: if there is no such folder, no such file in it, or the table has no column of files.
    """
    folder = open_folder(root)
    if folder is None:
        is_missing = not is_url(root) and not Path(root).exists()
        raise UserError(f"{root} {'does not exist' if is_missing else 'is not a folder'}; give a folder of {kind}s")
    table = table or next(filter(None, (folder.path(f"metadata{suffix}") for suffix in TABLES)), None)
    listing = Listing()
    if table not in (None, BY_FOLDER):
        _list_table(folder, kind, table, listing)
    else:
        labels = _labels(folder) if table else None
        for name in folder.names():
            if is_of_kind(folder, name, kind):
                caption = _side_caption(folder, name, listing) if labels is None else _label(labels, name)
                listing.add(Source(name=name, kind=kind, path=folder.path(name), **caption))
    if not listing.sources:
        moving = f", and {', '.join(animations.SUFFIXES)} that move" if kind == "video" else ""
        raise UserError(f"{root} holds no {kind}s ({', '.join(SUFFIXES[kind])}{moving})")
    return listing.sorted()


def is_of_kind(folder: Folder, name: str, kind: Kind) -> bool:
    """Whether a file is one, as its name says; of pictures that may move, as their first bytes say."""
    suffix = PurePosixPath(name).suffix.lower()
    if kind == "video" and suffix in animations.SUFFIXES:
        try:
            with open_file(folder.path(name)) as file:
                return animations.is_animated(file.read(animations.HEAD_BYTES))
        except OSError:
            return False
    return suffix in SUFFIXES[kind]


def _labels(folder: Folder) -> dict[str, str]:
    """Folder's name -> words."""
    path = next(filter(None, map(folder.path, LABELS)), None)
    if path is None:
        return {}
    try:
        with open_text(path) as file:
            lines = file.read(MAX_LABEL_CHARACTERS).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return {
        name: words for name, _, words in (line.partition("\t" if "\t" in line else " ") for line in lines) if words
    }


def _label(labels: dict[str, str], name: str) -> dict[str, Any]:
    label = PurePosixPath(name).parent.name
    return {"caption": _as_text(labels.get(label, label.replace("_", " ")).strip())}


def _list_table(folder: Folder, kind: Kind, table: str, listing: Listing) -> None:
    has_captions = False
    for number, row in enumerate(read_table(table)):
        column = column_of(row, FILE_COLUMNS)
        if column is None:
            raise UserError(f"{table} has no column of files; name it one of {', '.join(FILE_COLUMNS)}")
        has_captions |= column_of(row, CAPTION_COLUMNS) is not None
        name = str(row[column])
        if not folder.holds(name):
            listing.skip(name, "outside the source folder", f"row {number} of {PurePosixPath(table).name}")
        elif (path := folder.path(name)) is None:
            listing.skip(name, "missing file", f"row {number} of {PurePosixPath(table).name}")
        else:
            listing.add(Source(name=name, kind=kind, path=path, **described(row)))
    if not has_captions:
        raise UserError(f"{table} has no column of captions; name it one of {', '.join(CAPTION_COLUMNS)}")
    if len({source.name for source in listing.sources}) < len(listing.sources):
        raise UserError(f"{table} names a file twice; give each of them one row")


def read_table(path: str) -> Iterator[dict[str, Any]]:
    """Rows of a CSV, JSONL or Parquet file.

    Raises:
        UserError: if it is none of them, or broken.
    """
    suffix = PurePosixPath(path).suffix
    try:
        if suffix == ".parquet":
            yield from read_parquet(path)
        elif suffix == ".csv":
            with open_text(path) as file:
                yield from csv.DictReader(file)
        elif suffix == ".jsonl":
            with open_text(path) as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _row(parse_json(line, f"line {number} of {path}"), path)
        else:
            raise UserError(f"{path} is no table; give a name that ends in {', '.join(TABLES)}")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a table of files and captions: {', '.join(TABLES)}") from None
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _row(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{path} cannot be read: a line is {ascii(value)[:60]}, not names and values")
    return value


def parquet_rows(path: str) -> int:
    """How many rows a Parquet file has; raises as `read_parquet`."""
    with _open_parquet(path) as table:
        return table.metadata.num_rows


def read_parquet(path: str, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows from `start` to `stop` of a Parquet file; only the row groups that hold them are read.

    Raises:
        UserError: if it is none, or broken, or pyarrow is missing.
    """
    with _open_parquet(path) as table:
        stop = table.metadata.num_rows if stop is None else stop
        ends = list(accumulate(table.metadata.row_group(n).num_rows for n in range(table.num_row_groups)))
        starts = [0, *ends[:-1]]
        groups = [n for n, (first, end) in enumerate(zip(starts, ends, strict=True)) if first < stop and end > start]
        number = starts[groups[0]] if groups else 0
        for batch in table.iter_batches(batch_size=64, row_groups=groups):
            wanted = batch.slice(max(0, start - number), max(0, stop - max(start, number)))
            number += len(batch)
            yield from wanted.to_pylist()


@contextmanager
def _open_parquet(path: str) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        name = PurePosixPath(path).name
        raise UserError(f"reading {name} needs the library pyarrow; pip install 'megadit[tables]'") from None
    try:
        with open_file(path) as file, pyarrow.parquet.ParquetFile(file) as table:
            yield table
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _side_caption(folder: Folder, name: str, listing: Listing) -> dict[str, Any]:
    beside = f"{name}.json", *(str(PurePosixPath(name).with_suffix(suffix)) for suffix in (".json", ".txt"))
    try:
        for side in beside:
            if (path := folder.path(side)) is not None:
                return _caption(PurePosixPath(side).suffix, _beginning(path))
    except (OSError, ValueError) as error:
        listing.skip(PurePosixPath(name).name, "unreadable caption", str(error))
    return {}


def _beginning(path: str) -> bytes:
    with open_file(path) as file:
        return file.read(MAX_CAPTION_BYTES)


def _caption(suffix: str, content: bytes) -> dict[str, Any]:
    """Caption and score in a file beside a picture.

    Raises:
        ValueError: if it is not UTF-8, or as JSON not an object.
    """
    if suffix != ".json":
        return {"caption": content.decode("utf-8").strip()}
    values = parse_json(content, "it")
    if not isinstance(values, dict):
        raise ValueError("it is not names and values")
    return described(values)


def described(row: dict[str, Any]) -> dict[str, Any]:
    """Caption and score of a row or a description."""
    column = column_of(row, CAPTION_COLUMNS)
    score = row.get("aesthetic_score")
    try:
        score = None if score in (None, "") else float(score)
    except (TypeError, ValueError, OverflowError):
        score = None
    if score is not None and not math.isfinite(score):
        score = None
    return {"caption": _as_text(str(row[column] or "")).strip() if column else "", "aesthetic_score": score}


def column_of(row: dict[str, Any], names: Iterable[str]) -> str | None:
    """The first of these columns that the row has."""
    return next((name for name in names if name in row), None)


# --- WebDataset shards --------------------------------------------------------------------------------------------


def list_webdataset(root: str | Path, kind: Kind | None = None) -> Listing:
    """The videos and images inside tar files, where they lie: nothing is unpacked. Captions are the members of the
    same key that end in .txt, .caption or .json.

    Raises:
        UserError: if there are no tar files, or none with videos or images.
    """
    is_remote_file = is_url(root) and str(root).endswith(".tar")
    if is_remote_file or Path(root).is_file():
        shards = {PurePosixPath(root).name: str(root) if is_remote_file else str(Path(root).resolve())}
    else:
        folder = open_folder(root)
        names = sorted(name for name in folder.names() if name.endswith(".tar")) if folder is not None else ()
        if folder is not None and folder.path(INFO_FILE):  # a data set of ours: what it was made from, where it is kept
            names = [name for name in names if name.startswith(f"{ORIGINALS}/")] or names
        shards = {name: folder.path(name) for name in names}
    if not shards:
        raise UserError(f"{root} holds no tar files")
    listing = list_shards(shards, kind)
    if not listing.sources:
        raise UserError(f"the tar files of {root} hold no {kind or 'video or image'}s")
    return listing.sorted()


def list_shards(shards: Mapping[str, str], kind: Kind | None = None) -> Listing:
    """The videos and images inside tar files: name -> path."""
    listing = Listing()
    for name, path in shards.items():
        _list_shard(path, name, kind, listing)
    return listing


def _list_shard(path: str, shard: str, kind: Kind | None, listing: Listing) -> None:
    media: dict[str, tuple[tarfile.TarInfo, Kind]] = {}
    captions: dict[str, dict[str, Any]] = {}
    for member, content in _members(path, shard, listing):
        folder, _, file = member.name.rpartition("/")
        key, _, suffix = file.partition(".")
        key, suffix = f"{folder}/{key}" if folder else key, "." + suffix.lower()
        kinds = [known for known in _kinds(suffix, content) if kind in (None, known)]
        if kinds and key in media:
            listing.skip(f"{shard}/{member.name}", "second picture of a sample")
        elif kinds:
            media[key] = (member, kinds[0])
        elif suffix in (".txt", ".caption", ".json"):
            try:
                captions[key] = {**captions.get(key, {}), **_caption(suffix, content(MAX_CAPTION_BYTES))}
            except ValueError as error:
                listing.skip(f"{shard}/{member.name}", "unreadable caption", str(error))
    for key, (member, found) in media.items():
        listing.add(
            Source(
                name=f"{shard}/{key}",
                kind=found,
                path=path,
                offset=member.offset_data,
                size=member.size,
                **captions.get(key, {}),
            )
        )


def _kinds(suffix: str, content: Callable[[int], bytes]) -> list[Kind]:
    if suffix in animations.SUFFIXES and animations.is_animated(content(animations.HEAD_BYTES)):
        return ["video", "image"]
    return [kind for kind, suffixes in SUFFIXES.items() if suffix in suffixes]


def _members(path: str, shard: str, listing: Listing) -> Iterator[tuple[tarfile.TarInfo, Callable[[int], bytes]]]:
    """Regular members that lie whole inside the file, each with a way to read so many bytes of it."""
    try:
        with open_file(path) as file:
            length = file_size(file)
            tar = ForeignTarFile.open(fileobj=file, mode="r:")  # noqa: SIM115  (it holds nothing but the file)
            for member in tar:
                if not member.isfile():
                    listing.skip(f"{shard}/{member.name}", "not a file", "a link, folder or device in a tar file")
                elif member.offset_data + member.size > length:
                    listing.skip(f"{shard}/{member.name}", "cut short", f"{member.size} bytes are announced")
                    return  # nothing can follow
                else:
                    yield member, lambda size, tar=tar, member=member: tar.extractfile(member).read(size)
    except (tarfile.TarError, OSError, ValueError, EOFError) as error:
        listing.skip(shard, "broken tar file", str(error))
