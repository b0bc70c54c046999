"""Where videos and images come from: folders, WebDataset shards, tables of a Hugging Face data set.

Each listing gives `Source`s, in an order that depends on their names alone, and `Skip`s for what it cannot use. Names
inside archives and tables are names and nothing more: no path is made from them.
"""

import csv
import json
import math
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from megadit.models.shared.documents import parse_json
from megadit.models.shared.errors import UserError, choose_one
from megadit.models.shared.progress import Progress
from megadit.train.data.ingest.download import download
from megadit.train.data.ingest.files import Folder, file_size, open_file, open_folder, open_text
from megadit.train.data.ingest.plan import Kind, Skip, Source, write_lines
from megadit.train.data.places import is_url
from megadit.train.data.tar_files import ForeignTarFile

SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "video": tuple(".mp4 .m4v .mov .mkv .webm .avi .mpg .mpeg .ts .flv .ogv .wmv .gif".split()),
    "image": tuple(".jpg .jpeg .png .webp .bmp .tif .tiff .ppm".split()),
}
TABLES = (".csv", ".jsonl", ".parquet")
FILE_COLUMNS = ("file_name", "path", "file", "video", "image", "video_path", "image_path")
CAPTION_COLUMNS = ("caption", "text", "prompt", "name")
IMAGE_COLUMNS = ("image", "jpg", "png", "img")
URL_COLUMNS = ("image_url", "url", "URL")
MAX_CAPTION_BYTES = 1 << 20
ROWS_OF_A_SHARD = 1000


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
    """Files under `root`, captioned by a table (`metadata.csv`, `.jsonl` or `.parquet`, or the one given), or by
    `clip.txt` or `clip.json` beside `clip.mp4`.

    Raises:
        UserError: if there is no such folder, no such file in it, or the table has no column of files.
    """
    folder = open_folder(root)
    if folder is None:
        raise UserError(f"{root} is not a folder of {kind}s")
    table = table or next(filter(None, (folder.path(f"metadata{suffix}") for suffix in TABLES)), None)
    listing = Listing()
    if table is not None:
        _list_table(folder, kind, table, listing)
    else:
        for name in folder.names():
            if PurePosixPath(name).suffix.lower() in SUFFIXES[kind]:
                caption = _side_caption(folder, name, listing)
                listing.add(Source(name=name, kind=kind, path=folder.path(name), **caption))
    if not listing.sources:
        raise UserError(f"{root} holds no {kind}s ({', '.join(SUFFIXES[kind])})")
    return listing.sorted()


def _list_table(folder: Folder, kind: Kind, table: str, listing: Listing) -> None:
    for number, row in enumerate(read_table(table)):
        column = _column(row, FILE_COLUMNS)
        if column is None:
            raise UserError(f"{table} has no column of files; name it one of {', '.join(FILE_COLUMNS)}")
        name = str(row[column])
        if not folder.holds(name):
            listing.skip(name, "outside the source folder", f"row {number} of {PurePosixPath(table).name}")
        elif (path := folder.path(name)) is None:
            listing.skip(name, "missing file", f"row {number} of {PurePosixPath(table).name}")
        else:
            listing.add(Source(name=name, kind=kind, path=path, **_described(row)))
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
            yield from _read_parquet(path)
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
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _row(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{path} cannot be read: a line is {ascii(value)[:60]}, not names and values")
    return value


def _read_parquet(path: str) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        name = PurePosixPath(path).name
        raise UserError(f"reading {name} needs the library pyarrow; pip install 'megadit[tables]'") from None
    try:
        with open_file(path) as file, pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=64):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _side_caption(folder: Folder, name: str, listing: Listing) -> dict[str, Any]:
    text, description = (folder.path(str(PurePosixPath(name).with_suffix(suffix))) for suffix in (".txt", ".json"))
    try:
        if description is not None:
            return _caption(".json", _beginning(description))
        if text is not None:
            return _caption(".txt", _beginning(text))
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
    return _described(values)


def _described(row: dict[str, Any]) -> dict[str, Any]:
    """Caption and score of a row or a description."""
    column = _column(row, CAPTION_COLUMNS)
    score = row.get("aesthetic_score")
    try:
        score = None if score in (None, "") else float(score)
    except (TypeError, ValueError, OverflowError):
        score = None
    if score is not None and not math.isfinite(score):
        score = None
    return {"caption": _as_text(str(row[column] or "")).strip() if column else "", "aesthetic_score": score}


def _column(row: dict[str, Any], names: Iterable[str]) -> str | None:
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
        shards = {name: folder.path(name) for name in names}
    if not shards:
        raise UserError(f"{root} holds no tar files")
    listing = Listing()
    for name, path in shards.items():
        _list_shard(path, name, kind, listing)
    if not listing.sources:
        raise UserError(f"the tar files of {root} hold no {kind or 'video or image'}s")
    return listing.sorted()


def _list_shard(path: str, shard: str, kind: Kind | None, listing: Listing) -> None:
    media: dict[str, tuple[tarfile.TarInfo, Kind]] = {}
    captions: dict[str, dict[str, Any]] = {}
    for member, content in _members(path, shard, listing):
        folder, _, file = member.name.rpartition("/")
        key, _, suffix = file.partition(".")
        key, suffix = f"{folder}/{key}" if folder else key, "." + suffix.lower()
        kinds = [known for known, suffixes in SUFFIXES.items() if suffix in suffixes and kind in (None, known)]
        if kinds and key in media:
            listing.skip(f"{shard}/{member.name}", "second picture of a sample")
        elif kinds:
            media[key] = (member, kinds[0])
        elif suffix in (".txt", ".caption", ".json"):
            try:
                captions[key] = {**captions.get(key, {}), **_caption(suffix, content())}
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


def _members(path: str, shard: str, listing: Listing) -> Iterator[tuple[tarfile.TarInfo, Callable[[], bytes]]]:
    """Regular members that lie whole inside the file, each with a way to read a small one."""
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
                    yield member, lambda tar=tar, member=member: tar.extractfile(member).read(MAX_CAPTION_BYTES)
    except (tarfile.TarError, OSError, ValueError, EOFError) as error:
        listing.skip(shard, "broken tar file", str(error))


# --- tables with pictures inside, or their addresses -------------------------------------------------------------


def list_tables(root: str, fetched: Path, *, split: str = "train", caption_column: str | None = None) -> Listing:
    """The images of a Hugging Face data set: Parquet files, in a folder or to be downloaded by the data set's id,
    whose rows hold the bytes of an image or its address. They are copied into tar files under `fetched`, one for each
    thousand rows; those that are there already are kept.

    Raises:
        UserError: if there is no such data set, or its tables hold no images.
    """
    folder = open_folder(root) or open_folder(_download_dataset(root))
    names = sorted(name for name in folder.names() if name.endswith(".parquet") and _is_of_split(name, split))
    tables = [folder.path(name) for name in names]
    if not tables:
        raise UserError(f"{root} holds no Parquet files of a split {split!r}")
    fetched.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(_row_groups(tables)):
        _fetch_rows(fetched / f"rows-{number:06d}.tar", rows, number, caption_column)
    listing = list_webdataset(fetched, "image")
    for path in sorted(fetched.glob("*.skips.jsonl")):
        with open(path, encoding="utf-8") as file:
            listing.skips += [Skip(**json.loads(line)) for line in file]
    return listing.sorted()


def _is_of_split(name: str, split: str) -> bool:
    """Files of other splits say so in their names, or in their folder's."""
    others = {"train", "val", "validation", "test"} - {split}
    path = PurePosixPath(name)
    words = {path.parent.name, *path.stem.replace("-", "_").split("_")}
    return not words & others


def _download_dataset(name: str) -> Path:
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise UserError(f"{name} is neither a folder nor the id of a data set, such as owner/name")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    except ModuleNotFoundError:
        raise UserError(f"downloading {name} needs huggingface_hub; pip install 'megadit[tables]'") from None
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns="*.parquet"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise UserError(f"the data set {name} cannot be downloaded: {str(error).splitlines()[0]}") from None


def _row_groups(tables: list[str]) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    for table in tables:
        for row in read_table(table):
            rows.append(row)
            if len(rows) == ROWS_OF_A_SHARD:
                yield rows
                rows = []
    if rows:
        yield rows


def _fetch_rows(path: Path, rows: list[dict[str, Any]], number: int, caption_column: str | None) -> None:
    """One tar file of images and captions; rows without an image are noted beside it, first."""
    from megadit.train.data.writer import write_members  # torch and safetensors, which listing files does without

    if path.is_file():
        return
    members: list[tuple[str, bytes]] = []
    skips: list[Skip] = []
    with Progress(len(rows), f"fetching {path.name}") as bar:
        for index, row in enumerate(rows):
            name = f"{number * ROWS_OF_A_SHARD + index:09d}"
            bar.advance()
            try:
                content = _picture(row)
            except (OSError, ValueError) as error:
                skips.append(Skip(source=name, reason="not fetched", detail=str(error)))
                continue
            members += [(f"{name}.jpg", content), (f"{name}.json", _row_description(row, caption_column))]
    write_lines(path.with_suffix(".skips.jsonl"), skips)
    write_members(path, members)


def _row_description(row: dict[str, Any], caption_column: str | None) -> bytes:
    described = _described(row)
    if caption_column is not None:
        choose_one(caption_column, row, f"the tables have no column {caption_column!r}")
        described["caption"] = str(row[caption_column] or "").strip()
    return json.dumps(described, ensure_ascii=False).encode()


def _picture(row: dict[str, Any]) -> bytes:
    for name in IMAGE_COLUMNS:
        value = row.get(name)
        content = value.get("bytes") if isinstance(value, dict) else value
        if isinstance(content, bytes):
            return content
    column = _column(row, URL_COLUMNS)
    if column is None:
        raise UserError(
            f"the tables hold no images: none of the columns {', '.join(row)} is one of {', '.join(IMAGE_COLUMNS)} "
            f"(bytes) or {', '.join(URL_COLUMNS)}"
        )
    return download(str(row[column]))
