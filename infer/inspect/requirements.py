"""Checks the requirements of megadit's extras, recursively, by the metadata of installed distributions."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megadit.models.shared.errors import UserError, choose_one

NAME = "megadit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """One requirement of a distribution."""

    name: str
    """Canonical name."""
    asked: str
    """Requirement as it is written, such as `onnx>=1.18`."""
    by: str
    """The distribution that requires it."""
    found: str | None
    """The installed version; None if it is missing."""
    is_met: bool


def needs_of(extras: Collection[str], name: str = NAME) -> Iterator[Need]:
    """Yield the requirements of a distribution with these extras, and theirs in turn; each pair once.

    Raises:
        UserError: if it is not installed, or has no such extra.
    """
    if _version(name) is None:
        raise UserError(f"{name} is not installed, so its extras are unknown: pip install -e .")
    known = metadata.metadata(name).get_all("Provides-Extra") or []
    for extra in extras:
        choose_one(extra, known, f"{name} has no extra {extra!r}")
    seen, waiting = set(), [(canonicalize_name(name), frozenset(extras))]
    while waiting:
        asking = waiting.pop()
        if asking in seen:
            continue
        seen.add(asking)
        for requirement in _required(*asking):
            needed = canonicalize_name(requirement.name)
            found = _version(needed)
            is_met = found is not None and requirement.specifier.contains(found, prereleases=True)
            if needed != canonicalize_name(name):
                asked = f"{requirement.name}{requirement.specifier}"
                yield Need(name=needed, asked=asked, by=asking[0], found=found, is_met=is_met)
            if found is not None:
                waiting.append((needed, frozenset(requirement.extras)))


def _required(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    for requirement in _requirements(name):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


@cache
def _requirements(name: str) -> list[Requirement]:
    return list(map(Requirement, metadata.requires(name) or []))


@cache
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
