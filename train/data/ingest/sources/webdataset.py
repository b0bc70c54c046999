"""Videos and images inside tar files, read in place, with their captions.

Members of a sample have the same key: the name up to its last dot, without a field name before that (`a.jpg` and
`a.txt`, `a.jpg.txt`, `a.input.jpg` and `a.output.txt`; but `clip_v1.0.jpg` and `clip_v1.1.txt` differ). A repeated name
begins another sample.
"""

import tarfile
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megadit.models.shared.captions import MAX_CAPTION_BYTES
from megadit.models.shared.documents import placeholder
from megadit.models.shared.errors import UserError
from megadit.models.shared.outside import HIDDEN, is_litter
from megadit.models.shared.tar_files import UntrustedTarFile
from megadit.train.data.ingest.plan import Kind, Source
from megadit.train.data.ingest.sources.files import file_size, open_file, open_folder
from megadit.train.data.ingest.sources.layouts import SIDE_SUFFIXES, caption_of
from megadit.train.data.ingest.sources.listing import Listing, Reading, stamp_of
from megadit.train.data.ingest.sources.rows import TABLES
from megadit.train.data.ingest.sources.sniff import HEAD_BYTES, kinds_of
from megadit.train.dataset.dataset_info import INFO_FILE
from megadit.train.dataset.places import is_url

SOURCE_MEDIA = "source_media"
"""Folder of a data set in which `megadit prepare --source_media` stores source media."""
COMPRESSED = {
    ".tar.gz": "gunzip", ".tgz": "gunzip", ".tar.bz2": "bunzip2", ".tar.xz": "unxz", ".tar.zst": "unzstd",
    ".tar.lz4": "unlz4", ".zip": "unzip",
}  # fmt: skip
"""Suffix of a compressed archive -> the program that unpacks it."""
UNPACKED_BY = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd",
               b"\x04\x22M\x18": "unlz4", b"PK\3\4": "unzip"}  # fmt: skip
"""First bytes of a compressed file -> the program that unpacks it."""
FIELDS = frozenset(
    "input output source target original edited before after image img video clip caption captions text txt prompt "
    "label meta metadata mask depth canny seg pose thumb thumbnail jpg jpeg png webp mp4 mov mkv webm avi gif".split()
)
"""Words between a key and a suffix that are no part of the key."""


def list_webdataset(root: str | Path, kind: Kind | None = None, *, reading: Reading = Reading()) -> Listing:  # noqa: B008
    """The videos and images inside tar files, where they lie: nothing is unpacked. Captions are the members of the
    same key that end in .txt, .caption or .json.

    Raises:
        UserError: if there are no tar files, or none with videos or images.
    """
    listing = Listing()
    shards = _shards(root, reading, listing)
    if not shards:
        why = listing.why_empty()
        raise UserError(f"{root} holds no tar files{why and f': {why}'}")
    list_shards(shards, kind, reading=reading, listing=listing)
    if not listing.sources:
        why = listing.why_empty()
        raise UserError(f"the tar files of {root} hold no {kind or 'video or image'}s to use{why and f': {why}'}")
    return listing.sorted()


def _shards(root: str | Path, reading: Reading, listing: Listing) -> dict[str, str]:
    """Name -> path of each tar file."""
    is_remote_file = is_url(root) and str(root).endswith(".tar")
    if is_remote_file or Path(root).is_file():
        return {PurePosixPath(root).name: str(root) if is_remote_file else str(Path(root).resolve())}
    folder = open_folder(root, follow_links=reading.follow_links)
    if folder is None:
        return {}
    names = [name for name in folder.names() if name.lower().endswith(".tar")]
    if INFO_FILE in folder:  # a data set of ours: what it was made from, where it is kept
        names = [name for name in names if name.startswith(f"{SOURCE_MEDIA}/")] or names
    else:
        for name in sorted(set(folder.names()) - set(names)):
            program = next((program for suffix, program in COMPRESSED.items() if name.lower().endswith(suffix)), None)
            listing.pass_over(name, f"compressed tar file (unpack it: {program})" if program else "not a tar file")
        for name, reason in folder.not_used.items():
            listing.pass_over(name, reason)
    return {name: folder.path(name) for name in names}


def list_shards(
    shards: Mapping[str, str],
    kind: Kind | None = None,
    *,
    reading: Reading = Reading(),  # noqa: B008  (it is frozen)
    listing: Listing | None = None,
    is_stamped: bool = True,
) -> Listing:
    """The videos and images inside tar files: name -> path."""
    listing = listing or Listing()
    for name, path in shards.items():
        _list_shard(path, name, kind, listing, reading, stamp_of(path) if is_stamped else "")
    return listing


@dataclass(slots=True)
class _Member:
    """A picture or video, or the content of a caption."""

    info: tarfile.TarInfo
    key: str
    repeat: int
    """Number of earlier members of the same name."""
    kind: Kind | None = None
    captions: tuple[str, ...] = ()
    score: float | None = None
    trouble: str = ""


def _list_shard(path: str, shard: str, kind: Kind | None, listing: Listing, reading: Reading, stamp: str) -> None:
    media, texts = _sorted_members(path, shard, kind, listing, reading)
    repeats = Counter((member.key, member.info.name) for member in [*media, *texts])
    counts = defaultdict(set)
    for (key, _), count in repeats.items():
        counts[key].add(count)
    by_key: dict[tuple[str, int], _Member] = {}
    for member in sorted(media, key=lambda member: _has_field(member.info.name)):  # `a.png` before `a.depth.png`
        place = f"{shard}/{member.info.name}"
        if len(counts[member.key]) > 1:
            listing.skip(place, "repeated key", "not as often as its caption: which belongs to which is not known")
        elif (member.key, member.repeat) in by_key:
            listing.skip(place, "second picture of a sample")
        else:
            by_key[member.key, member.repeat] = member
    for text in texts:
        owner = by_key.get((text.key, text.repeat))
        if owner is None:
            listing.pass_over(
                f"{shard}/{text.info.name}", f"{PurePosixPath(text.info.name).suffix.lower()} of no sample"
            )
            continue
        owner.captions, owner.trouble = owner.captions or text.captions, owner.trouble or text.trouble
        owner.score = text.score if owner.score is None else owner.score
    for (_, repeat), member in by_key.items():
        if member.trouble and not member.captions:
            listing.skip(f"{shard}/{member.info.name}", "unreadable caption", member.trouble)
            continue
        listing.add(
            Source(
                name=f"{shard}/{_key(member.info.name)}{f'#{repeat + 1}' if repeat else ''}",
                kind=member.kind,
                path=path,
                offset=member.info.offset_data,
                size=member.info.size,
                caption=member.captions[0] if member.captions else "",
                more_captions=member.captions[1:],
                aesthetic_score=member.score,
                stamp=stamp,
            )
        )


def _sorted_members(
    path: str, shard: str, kind: Kind | None, listing: Listing, reading: Reading
) -> tuple[list[_Member], list[_Member]]:
    """The pictures and videos of a tar file, and its captions."""
    media, texts, seen = [], [], Counter()
    for info, content in _members(path, shard, listing):
        file = info.name.rpartition("/")[2]
        member = _Member(info, _key(_plain(info.name)), seen[info.name])
        seen[info.name] += 1
        kinds = [
            known for known in kinds_of(file, lambda content=content: content(HEAD_BYTES)) if kind in (None, known)
        ]
        if any(is_litter(part) for part in info.name.split("/") if part.strip(".")):
            listing.pass_over(f"{shard}/{info.name}", HIDDEN)
        elif kinds:
            member.kind = kinds[0]
            media.append(member)
        elif PurePosixPath(file).suffix.lower() in SIDE_SUFFIXES:
            try:
                member.captions, member.score = caption_of(file, content(MAX_CAPTION_BYTES), reading)
            except ValueError as error:
                member.trouble = f"{file}: {error}"
            texts.append(member)
        else:
            suffix = PurePosixPath(file).suffix.lower()
            remedy = ": unpack tar files with tables" if suffix in TABLES else ""
            listing.pass_over(f"{shard}/{info.name}", f"{suffix}{remedy}" or "file without a suffix")
    return media, sorted(texts, key=lambda text: not text.info.name.lower().endswith(".json"))


def _key(name: str) -> str:
    folder, slash, file = name.rpartition("/")
    stem, dot, _ = file.rpartition(".")
    stem = stem if dot else file
    while "." in stem and stem[stem.rfind(".") + 1 :].lower() in FIELDS:
        stem = stem[: stem.rfind(".")]
    return f"{folder}{slash}{stem}"


def _has_field(name: str) -> bool:
    return PurePosixPath(_key(name)).name != PurePosixPath(name).stem


def _plain(name: str) -> str:
    """A name as it is compared: tars that several systems add to have accents and paths in several forms."""
    return str(PurePosixPath("/", unicodedata.normalize("NFC", name).replace("\\", "/"))).lstrip("/")


def _members(path: str, shard: str, listing: Listing) -> Iterator[tuple[tarfile.TarInfo, Callable[[int], bytes]]]:
    """Regular members that lie whole inside the file, each with a way to read so many bytes of it."""
    try:
        with open_file(path) as file:
            length = file_size(file)
            head = file.read(HEAD_BYTES)
            if program := next((program for magic, program in UNPACKED_BY.items() if head.startswith(magic)), None):
                listing.skip(shard, f"compressed tar file (unpack it: {program})", "whatever its name says")
                return
            if found := placeholder(head):
                listing.skip(shard, "broken tar file", f"it is {found}")
                return
            file.seek(0)
            tar = UntrustedTarFile.open(fileobj=file, mode="r:")  # noqa: SIM115  (it holds nothing but the file)
            for member in tar:
                if member.isdir():
                    continue
                if not member.isfile():
                    listing.skip(f"{shard}/{member.name}", "not a file", "a link, folder or device in a tar file")
                elif member.offset_data + member.size > length:
                    listing.skip(f"{shard}/{member.name}", "cut short", f"{member.size} bytes are announced")
                    return  # nothing can follow
                else:
                    yield member, lambda size, tar=tar, member=member: tar.extractfile(member).read(size)
    except (tarfile.TarError, OSError, ValueError, EOFError) as error:
        listing.skip(shard, "broken tar file", str(error))
