"""Cache of captions and scores of clips."""

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

from megadit.train.data.ingest.plan import Clip


class AnnotationCache:
    """Responses of a caption server or scorer about clips: JSON lines, appended immediately, so that none is requested
    twice. Look-ups use a temporary database, which is mostly on disk.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._count, whole = path, 0, 0
        self._database = sqlite3.connect("")
        self._database.execute("CREATE TABLE answers (name TEXT PRIMARY KEY, answer TEXT)")
        if not path.is_file():
            return
        with open(path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    whole += len(line)
                    self._know(*json.loads(line))
        os.truncate(path, whole)  # a killed process may leave an incomplete line

    def __len__(self) -> int:
        return self._count

    def of(self, clip: Clip) -> Any:
        """The cached response about a clip, or None."""
        found = self._database.execute("SELECT answer FROM answers WHERE name = ?", [self._name(clip)]).fetchone()
        return found and json.loads(found[0])

    def add(self, clip: Clip, answer: Any) -> None:
        self._know(self._name(clip), answer)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps([self._name(clip), answer], ensure_ascii=False) + "\n")

    def _know(self, name: str, answer: Any) -> None:
        self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", [name, json.dumps(answer)])
        self._count += 1

    @staticmethod
    def _name(clip: Clip) -> str:
        """Key of a clip, which differs if its source is replaced by another of the same name."""
        return f"{clip.key} {clip.fingerprint}"
