"""Locations of data: a folder, or a store such as S3.

Data sets are read through Energon's storage client, whose URLs are `msc://PROFILE/PATH` (profiles are defined in its
configuration file). `s3://BUCKET/PATH` and `gs://BUCKET/PATH` need no profile, and use credentials of the environment.
"""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_directory, cache_folder, held_alone, inner_path

if TYPE_CHECKING:
    from megatron.energon.epathlib import EPath

STORES = ("s3", "gs")
"""Kinds of URL that need no profile."""


def is_url(path: str | os.PathLike) -> bool:
    return "://" in str(path)


def place(path: "str | os.PathLike | EPath") -> "Path | EPath":
    """A Path, or an EPath for a URL; both have `/`, `open`, `is_file`, `is_dir`, `glob` and `name`.

    Raises:
        UserError: for an unsupported kind of URL, an unknown profile, or a missing library.
    """
    if not is_url(path):
        return Path(path)
    from megatron.energon.epathlib import EPath  # a second to import

    try:
        return EPath(energon_url(str(path)))
    except (AssertionError, ValueError, ImportError) as error:  # the client has no exceptions of its own for these
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path} cannot be reached: {reason}; give a folder, s3://BUCKET/PATH (pip install 'megadit[s3]'), or "
            "msc://PROFILE/PATH"
        ) from None


def energon_url(url: str) -> str:
    """Translate a URL to Energon's form: s3://BUCKET/PATH is msc://_s3-BUCKET/PATH."""
    kind, _, rest = url.partition("://")
    return f"msc://_{kind}-{rest}" if kind in STORES else url


def local_copy(folder: "Path | EPath", name: str) -> Path:
    """Return the folder itself, or its copy in the user's cache; `name` identifies the contents."""
    if isinstance(folder, Path):
        return folder
    of_place = hashlib.blake2b(str(folder).encode(), digest_size=8).hexdigest()  # names are untrusted
    cache = cache_folder() / of_place / name
    if not cache.is_dir():
        with held_alone(cache.with_name(f".{name}.lock")):
            if not cache.is_dir():  # another rank may have fetched it
                _fetch(folder, cache)
    return cache


def _fetch(folder: "EPath", out: Path) -> None:
    try:
        files = {str(file.relative_to(folder)): file for file in folder.walk()}
    except ValueError as error:
        raise UserError(
            f"{folder} holds files whose names point out of it ({error}); do not trust its source"
        ) from None
    with atomic_directory(out) as temporary:
        for name, file in files.items():
            target = inner_path(temporary, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            with file.open("rb") as source:
                target.write_bytes(source.read())
