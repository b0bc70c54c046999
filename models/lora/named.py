"""Adapters in requests, `NAME:SCALE`, and a service's folder of adapters.

DIR/zog.safetensors    one file, as written by `megadit convert` and the video API
DIR/zog/               a folder of PEFT's, or diffusers' own

Nothing here imports torch.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from megadit.models.shared.errors import UserError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,149}")
"""Pattern of adapter names in a folder: excludes paths, and hidden or incomplete files."""
OF_A_KEY = re.compile(r"(?P<name>.+)\.(?P<key>[0-9a-f]{12})\.[0-9a-f]{16}")
"""Name of an adapter that was uploaded with an API key; the gateway appends the key's id."""
SUFFIX = ".safetensors"


class MissingAdapterError(UserError):
    """There is no adapter of this name, or it was deleted."""


EXPERTS = {"high": "transformer", "low": "transformer_2"}
"""Prefix that limits an adapter to one of two experts (`high=PATH`) -> the expert's folder in a bundle."""


def split_expert(path: str) -> tuple[str | None, str]:
    """(expert, path) of `high=PATH` or `low=PATH`; expert None: every network."""
    expert, equals, rest = path.partition("=")
    return (expert, rest) if equals and expert in EXPERTS else (None, path)


def parse_adapter(text: str, what: str = "adapter") -> tuple[str, float]:
    """(path or name, scale) of `PATH:SCALE`, or of `PATH`, whose scale is 1; `what` it is, in errors.

    Raises:
        UserError: for a scale that is not finite.
    """
    path, colon, tail = text.rpartition(":")
    try:
        scale = float(tail) if colon and path else None
    except ValueError:
        scale = None
    if scale is not None and not math.isfinite(scale):
        raise UserError(f"{what} {text}: the scale must be a finite number")
    return (text, 1.0) if scale is None else (path, scale)


def parse_adapters(texts: Sequence[str], what: str = "adapter") -> dict[str, float]:
    """Path or name -> scale, for several texts; `what` they are, in errors.

    Raises:
        UserError: as `parse_adapter`, and for repeated adapters.
    """
    scales = dict(parse_adapter(text, what) for text in texts)
    if len(scales) < len(texts):
        raise UserError(f"one {what} is given twice in {', '.join(texts)}; give it once, with one scale")
    return scales


def of_expert(expert: str | None, path: str) -> str:
    """Join expert and path to `high=PATH`, the inverse of `split_expert`."""
    return path if expert is None else f"{expert}={path}"


def check_name(name: str) -> None:
    """Raises:
    UserError: for an invalid adapter name.
    """
    if not NAME.fullmatch(name):
        raise UserError(f"adapter {name[:80]!r}: a name has letters, digits, _, . and -, up to 150, and no path")


def adapters_in(folder: Path) -> list[str]:
    """The adapter names of a folder, including those of API keys, sorted."""
    paths = folder.iterdir() if folder.is_dir() else ()
    names = (path.name if path.is_dir() else path.name.removesuffix(SUFFIX) for path in paths if _is_one(path))
    return sorted(name for name in names if NAME.fullmatch(name))


def find_adapter(folder: Path, name: str, max_bytes: int) -> Path:
    """The adapter of this name: a file, or a folder, with at most `max_bytes`.

    Raises:
        MissingAdapterError: if there is none.
        UserError: for an invalid name, a link out of the folder, and more bytes.
    """
    check_name(name)
    for found in (f"{name}{SUFFIX}", name):
        path = folder / found
        if path.exists() and _is_one(path):
            if not path.resolve().is_relative_to(folder.resolve()):
                raise UserError(f"the adapter {name!r} is a link out of its folder")
            size = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))
            if size > max_bytes:
                raise UserError(f"the adapter {name!r} has {size:,} bytes; this service takes {max_bytes:,}")
            return path
    raise MissingAdapterError(f"there is no adapter {name!r}")


def shown_name(name: str) -> str:
    """Return the name to show a person: without the suffix that the gateway adds to a key's adapters."""
    of_key = OF_A_KEY.fullmatch(name)
    return of_key["name"] if of_key else name


def _is_one(path: Path) -> bool:
    return path.is_dir() or path.suffix == SUFFIX
