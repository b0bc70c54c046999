"""Parquet tables with images and videos, or their URLs, as in Hugging Face data sets.

Rows are fetched in units of a thousand, each a tar file that `sources.list_shards` reads. A unit depends on its rows
alone. Files of an interrupted unit are kept next to it until it is complete.
"""

import json
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from megadit.models.shared.captions import captions_in, check_columns, score_in
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_path
from megadit.models.shared.outside import LEADS_OUT
from megadit.models.shared.progress import Progress
from megadit.train.data.ingest.lines import read_lines, write_lines
from megadit.train.data.ingest.plan import Skip
from megadit.train.data.ingest.sources.download import Downloads, download_all
from megadit.train.data.ingest.sources.files import open_folder
from megadit.train.data.ingest.sources.listing import Listing, Reading, counted
from megadit.train.data.ingest.sources.parquet import count_rows, read_parquet
from megadit.train.data.ingest.sources.sniff import HEAD_BYTES, extension_of
from megadit.train.data.ingest.sources.webdataset import list_shards
from megadit.train.data.ingest.workers import Workers
from megadit.train.dataset.places import is_url

ROWS_OF_A_UNIT = 1000
MEDIA_COLUMNS = ("image", "video", "jpg", "png", "mp4", "img", "images", "videos", "jpeg", "webp", "webm")
URL_COLUMNS = ("image_url", "video_url", "url", "URL", "contentUrl")
NOT_FETCHED = "not fetched: "
"""Prefix of reasons that a retry may resolve."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Rows of the Parquet files in a folder, or of the Hugging Face data set with this id, which is then downloaded.

    Raises:
        UserError: by any method, if there is no such data set, or its tables hold no media.
    """

    root: str
    fetched: Path
    """Folder of the tar files."""
    split: str = "train"
    reading: Reading = Reading()
    names_are_captions: bool = False
    """Whether the column `name` holds captions."""
    downloads: Downloads = field(default_factory=Downloads)

    def fetch(self, workers: Workers, *, again: bool = False) -> bool:
        """Fetch this rank's missing units; with `again`, also those with failed rows.

        Returns:
            Whether a unit was written.
        """
        mine = [unit for unit in workers.mine(self.num_units) if self._is_due(unit, again)]
        rows = sum(len(self._range(unit)) for unit in mine)
        with Progress(rows, "fetching", enabled=workers.is_first and rows > 0) as bar:
            for unit in mine:
                self._fetch(unit, bar)
        return bool(mine)

    def listing(self) -> Listing | None:
        """List the fetched sources; None while units are missing."""
        tars = [self._tar(unit) for unit in range(self.num_units)]
        if not all(tar.is_file() for tar in tars):
            return None
        listing = list_shards({tar.name: str(tar.resolve()) for tar in tars}, is_stamped=False)
        for unit in range(self.num_units):
            for values in read_lines(self._skips(unit)):
                listing.skips.append(Skip(**values))
        if not listing.sources:
            reasons = counted(Counter(skip.reason for skip in listing.skips).most_common())
            raise UserError(f"{self.root}: no row gave a picture or video: {reasons or 'there are none'}")
        return listing.sorted()

    @property
    def num_units(self) -> int:
        return -(-sum(count for _, count in self._files) // ROWS_OF_A_UNIT)

    @cached_property
    def _files(self) -> list[tuple[str, int]]:
        """(path, rows) of each table."""
        folder = open_folder(self.root, follow_links=self.reading.follow_links)
        if folder is None:  # the cache of a hub consists of links
            folder = open_folder(_download_dataset(self.root), follow_links=True)
        names = [name for name in folder.names() if name.endswith(".parquet") and _is_of_split(name, self.split)]
        if not names:
            links = sum(reason == LEADS_OUT for reason in folder.not_used.values())
            why = f": {links:,} x {LEADS_OUT}" if links else ""
            raise UserError(f"{self.root} holds no Parquet files of a split {self.split!r}{why}")
        paths = list(map(folder.path, names))
        return list(zip(paths, count_rows(paths), strict=True))

    def _range(self, unit: int) -> range:
        every = sum(count for _, count in self._files)
        return range(unit * ROWS_OF_A_UNIT, min(every, (unit + 1) * ROWS_OF_A_UNIT))

    def _rows(self, unit: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, row) of each."""
        rows, first = self._range(unit), 0
        for path, count in self._files:
            start, stop = max(rows.start, first), min(rows.stop, first + count)
            if start < stop:
                for number, row in enumerate(read_parquet(path, start - first, stop - first), start):
                    yield f"{number:09d}", row
            first += count

    def _tar(self, unit: int) -> Path:
        return self.fetched / f"rows-{unit:06d}.tar"

    def _skips(self, unit: int) -> Path:
        return self.fetched / f"rows-{unit:06d}.skips.jsonl"

    def _is_due(self, unit: int, again: bool) -> bool:
        if not self._tar(unit).is_file():
            return True
        shutil.rmtree(self._tar(unit).with_suffix(""), ignore_errors=True)
        return again and any(line["reason"].startswith(NOT_FETCHED) for line in read_lines(self._skips(unit)))

    def _fetch(self, unit: int, bar: Progress) -> None:
        """Write the unit's tar file, after the list of its rows without media."""
        tar, unpacked = self._tar(unit), self._tar(unit).with_suffix("")
        unpacked.mkdir(parents=True, exist_ok=True)
        if tar.is_file():
            _unpack(tar, unpacked)
        addresses: dict[Path, str] = {}
        descriptions: dict[Path, bytes] = {}
        skips: list[Skip] = []
        for name, row in self._rows(unit):
            check_columns(self.reading.columns, row, "the tables have")
            member = unpacked / name
            content = _media(row)
            try:
                descriptions[member] = self._description(row)
            except ValueError as error:
                content = None
                skips.append(Skip(source=name, reason="unreadable caption", detail=str(error)))
            else:
                if content is None:
                    is_of_several = any(
                        isinstance(row.get(each), list) and len(row[each]) > 1 for each in MEDIA_COLUMNS
                    )
                    reason = "row of several pictures" if is_of_several else "row without a picture"
                    skips.append(Skip(source=name, reason=reason))
            if content is None or member.is_file():
                bar.advance()
            elif isinstance(content, bytes):
                with atomic_path(member) as temporary:
                    temporary.write_bytes(content)
                bar.advance()
            else:
                addresses[member] = content
        reasons = download_all(addresses, self.downloads, bar.advance)
        skips += [
            Skip(source=member.name, reason=NOT_FETCHED + reason, detail=addresses[member])
            for member, reason in reasons.items()
        ]
        write_lines(self._skips(unit), skips)
        _pack(tar, {member: text for member, text in descriptions.items() if member.is_file()})
        shutil.rmtree(unpacked)

    def _description(self, row: dict[str, Any]) -> bytes:
        """The `.json` member of a row.

        Raises:
            ValueError: if its caption is no text.
        """
        columns = self.reading.columns or (("name",) if self.names_are_captions and "name" in row else ())
        captions = captions_in(row, columns) or ()
        return json.dumps({"caption": captions, "aesthetic_score": score_in(row)}, ensure_ascii=False).encode()


def _media(row: dict[str, Any]) -> bytes | str | None:
    """Content or URL of a row's image or video; None if it has neither, or several."""
    found = [row[name] for name in MEDIA_COLUMNS if name in row]
    values = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in found]
    for value in values:
        content = value.get("bytes") if isinstance(value, dict) else value
        if isinstance(content, bytes):
            return content
    addresses = [name for name in URL_COLUMNS if name in row]
    if not addresses and not found:
        raise UserError(
            f"the tables hold no pictures: none of the columns {', '.join(row)} is one of {', '.join(MEDIA_COLUMNS)} "
            f"(bytes) or {', '.join(URL_COLUMNS)}"
        )
    named = [str(row[name]) for name in addresses if row[name]]
    return next(iter([*named, *(value for value in values if isinstance(value, str) and is_url(value))]), None)


def _pack(tar: Path, descriptions: dict[Path, bytes]) -> None:
    from megadit.train.data.writer import write_members  # torch and safetensors, which listing files does without

    def members() -> Iterator[tuple[str, bytes | Path]]:
        for member, description in descriptions.items():
            yield member.name + _suffix(member), member
            yield f"{member.name}.json", description

    write_members(tar, members())


def _unpack(tar: Path, unpacked: Path) -> None:
    """Extract the files of a unit, so that only missing ones are fetched."""
    with tarfile.open(tar) as archive:
        for member in archive:
            name, _, suffix = member.name.partition(".")
            if suffix != "json":
                with atomic_path(unpacked / name) as temporary, open(temporary, "wb") as file:
                    shutil.copyfileobj(archive.extractfile(member), file)


def _suffix(member: Path) -> str:
    """Suffix by the file's content: its name may be wrong."""
    with open(member, "rb") as file:
        return extension_of(file.read(HEAD_BYTES))


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
