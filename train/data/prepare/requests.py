"""Resumable writing of data sets shard by shard: the recorded request, and missing shards.

After an interruption the same command continues, and writes the same bytes; a different one is refused.
"""

import shutil
import tarfile
from pathlib import Path
from typing import Any

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_json, write_json
from megadit.train.data.ingest.workers import Workers


def begin(
    out: Path,
    file: str,
    request: dict[str, Any],
    *,
    overwrite: bool,
) -> None:
    """Record the request in `file`, unless it was recorded before.

    Raises:
        UserError: if `out` holds something else.
    """
    path = out / file
    if overwrite and path.is_file():
        shutil.rmtree(out)
    if path.is_file():
        if read_json(path) != request:
            raise UserError(f"{out} holds samples of another request; give another folder, or --overwrite")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and was not begun by this command; give another folder, or remove it")
    else:
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, request)


def missing_shards(out: Path, split: str, count: int, size: int, workers: Workers) -> dict[Path, range]:
    """This rank's missing shards, each with the numbers of its samples."""
    numbers = {
        out / f"{split}-{shard:06d}.tar": range(shard * size, min(count, (shard + 1) * size))
        for shard in workers.mine(-(-count // size))
    }
    return {path: of_shard for path, of_shard in numbers.items() if not path.exists()}


def count_samples(out: Path, split: str) -> int:
    """Number of samples in the shards of a split."""
    count = 0
    for path in out.glob(f"{split}-*.tar"):
        with tarfile.open(path) as shard:
            count += sum(name.endswith(".json") for name in shard.getnames())
    return count
