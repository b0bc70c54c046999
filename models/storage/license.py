"""The license of published weights, whose files are copied into whatever is made from them."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megadit.models.shared.errors import UserError
from megadit.models.shared.outside import leads_out

_FILES = re.compile(r"(licen[cs]e|notice|copying|use[_-]policy)", re.IGNORECASE)
_IN_CARD = re.compile(r"^(?:license|license_name|license_link):\s*[\"']?(.+?)[\"']?\s*$", re.MULTILINE)
_FAMILIES_WITH_GUARDRAIL = ("cosmos",)
"""Families whose license (NVIDIA's Open Model License) forbids to bypass the guardrail without a substitute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class License:
    name: str
    """Name of the license in the model card; `unknown` without one."""
    asks_for_guardrail: bool = False
    """Whether the license requires a content filter."""
    files: tuple[Path, ...] = field(default=(), compare=False)
    """Paths of licenses, notices and the model card."""

    def copy_files(self, directory: Path) -> None:
        for path in self.files:
            directory.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, directory / path.name)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "asks_for_guardrail": self.asks_for_guardrail}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "License":
        """The inverse of `to_dict`.

        Raises:
            UserError: for other values: the conditions of the license would be unknown.
        """
        name, asks_for_guardrail = values.get("name"), values.get("asks_for_guardrail")
        if not isinstance(name, str) or not isinstance(asks_for_guardrail, bool):
            raise UserError(
                f"the license {dict(values)!r:.100} has no name, or does not say if it asks for a guardrail"
            )
        return cls(name=name, asks_for_guardrail=asks_for_guardrail)


def find_license(source: Path, family: str) -> License:
    """The license of the checkpoint at `source`, from files in its directory or the one above."""
    directories = [source] if source.is_dir() else [source.parent]
    if source.is_dir() and not (source / "model_index.json").exists():
        directories.append(source.parent)
    files, name = [], "unknown"
    for directory in directories:
        here = [path for path in sorted(directory.iterdir()) if path.is_file() and not leads_out(path, directory)]
        files += [path for path in here if _FILES.search(path.name)]
        cards = [path for path in here if path.name.lower() == "readme.md"]
        for card in cards:
            with card.open(encoding="utf-8", errors="replace") as file:
                found = _IN_CARD.findall(file.read(10_000))
            if found and name == "unknown":
                name = ", ".join(dict.fromkeys(found))
                files.append(card)
        if files:
            break
    return License(name=name, asks_for_guardrail=family in _FAMILIES_WITH_GUARDRAIL, files=tuple(files))
