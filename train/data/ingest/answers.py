"""Cache of answers about clips."""

import json
import os
from pathlib import Path
from typing import Any

from megadit.train.data.ingest.plan import Clip


class Answers:
    """Answers of a server or a program about clips, one line each, written at once so that nothing is asked twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        if path.is_file():
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):  # a process that was killed left half a line
                os.truncate(path, len(whole))
            for line in whole.splitlines():
                name, answer = json.loads(line)
                self._known[name] = answer

    def __len__(self) -> int:
        return len(self._known)

    def of(self, clip: Clip) -> Any:
        """The answer about a clip, or None."""
        return self._known.get(self._name(clip))

    def add(self, clip: Clip, answer: Any) -> None:
        self._known[self._name(clip)] = answer
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps([self._name(clip), answer], ensure_ascii=False) + "\n")

    @staticmethod
    def _name(clip: Clip) -> str:
        """Key of this clip, which no clip of a later source of the same name shares."""
        return f"{clip.key} {clip.fingerprint}"
