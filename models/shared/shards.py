"""Checks of a data set's shards: sizes at every start, checksums on request.

`shards.json` next to them has both; without it, the end of each index is the minimum size of its shard.
"""

import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, sha256_of, write_json

SHARDS_FILE = "shards.json"
_INFO = ".nv-meta/.info.json"
_THREADS = 16
"""Number of concurrent reads for checksums and sizes, which are limited by storage."""


def describe_shards(folder: Path) -> None:
    """Writes sizes and checksums of the shards to `shards.json`."""
    paths = sorted(folder.glob("[!.]*.tar"))
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = list(threads.map(sha256_of, paths))
    shards = {
        path.name: {"bytes": path.stat().st_size, "sha256": digest} for path, digest in zip(paths, sums, strict=True)
    }
    write_json(folder / SHARDS_FILE, shards)


def damaged_shards(folder: Path) -> list[str]:
    """A phrase for each shard, or index of one, with a wrong size."""
    known, counts = _recorded(folder), _counts(folder)
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda name: _fault(folder, name, known.get(name), counts.get(name)), known | counts)
        return [each for each in found if each is not None]


def verified_shards(folder: Path) -> list[str]:
    """Same as `damaged_shards`, with checksums.

    Raises:
        UserError: if there are no checksums.
    """
    known = _recorded(folder)
    if not known:
        raise UserError(f"{folder} has no {SHARDS_FILE}: it was prepared by an earlier version; prepare it again")
    damaged = damaged_shards(folder)
    whole = [name for name in known if not any(fault.startswith(f"{name} ") for fault in damaged)]
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = threads.map(lambda name: sha256_of(folder / name), whole)
        pairs = zip(whole, sums, strict=True)
        return damaged + [f"{name} has other contents" for name, digest in pairs if digest != known[name]["sha256"]]


def partly_copied(folder: Path, damaged: list[str]) -> str:
    """The error message for damaged shards."""
    more = f" (and {len(damaged) - 3} more)" if len(damaged) > 3 else ""
    return f"{folder} is damaged: {'; '.join(damaged[:3])}{more}. Copy these shards again, or prepare it again"


def _recorded(folder: Path) -> dict[str, dict]:
    if not (folder / SHARDS_FILE).is_file():
        return {}
    found = read_json(folder / SHARDS_FILE)
    if not isinstance(found, dict) or not all(map(_is_record, found.values())) or any("/" in name for name in found):
        raise UserError(
            f"{folder / SHARDS_FILE} is damaged: remove it to continue without checksums, or prepare the data set again"
        )
    return found


def _is_record(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("bytes"), int) and isinstance(value.get("sha256"), str)


def _counts(folder: Path) -> dict[str, int]:
    """Number of samples in each shard, recorded when the index was built."""
    if not (folder / _INFO).is_file():
        return {}
    info = read_json(folder / _INFO)
    counts = info.get("shard_counts") if isinstance(info, dict) else None
    return (
        {str(name): count for name, count in counts.items() if "/" not in str(name)} if isinstance(counts, dict) else {}
    )


def _fault(folder: Path, name: str, known: dict | None, count: object) -> str | None:
    try:
        size = (folder / name).stat().st_size
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    if size == 0:
        return f"{name} is empty"
    if known is not None and size != known["bytes"]:
        return f"{name} has {size:,} of its {known['bytes']:,} bytes"
    index = folder / f"{name}.idx"
    if not index.is_file():
        return None
    end = _end(index)
    if isinstance(count, int) and index.stat().st_size != 8 * (count + 1):
        return f"{name}.idx has {index.stat().st_size:,} of its {8 * (count + 1):,} bytes"
    return f"{name} has {size:,} bytes, and its index leads to {end:,}" if end > size else None


def _end(index: Path) -> int:
    """Byte offset of the end of the last sample of an index."""
    with index.open("rb") as file:
        file.seek(max(0, index.stat().st_size // 8 * 8 - 8))
        content = file.read(8)
    return struct.unpack("<Q", content)[0] if len(content) == 8 else 0
