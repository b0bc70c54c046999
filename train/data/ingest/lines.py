"""Notes as lines of JSON: files of them, and lists of millions, which lie in a temporary file instead of memory."""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, TypeVar

from megadit.models.shared.files import atomic_path

Value = TypeVar("Value")
BYTES_IN_MEMORY = 1 << 22
"""Longest list kept in memory; a longer one goes to the folder of temporary files (TMPDIR)."""
_encode = json.JSONEncoder(ensure_ascii=False).encode


def to_json(value: Any) -> Any:
    """Values as `dataclasses.asdict` gives them, without its copies, which take twice the time."""
    if isinstance(value, tuple):
        return tuple(map(to_json, value))
    names = getattr(type(value), "__dataclass_fields__", ())
    return {name: to_json(getattr(value, name)) for name in names} if names else value


def write_lines(path: Path, values: Iterable[Any]) -> None:
    """Dataclasses as JSON lines, whole or not at all."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.writelines(map(as_line, values))


def as_line(value: Any) -> str:
    return _encode(to_json(value)) + "\n"


def read_lines(path: Path, start: int = 0) -> Iterator[dict[str, Any]]:
    """Yields the lines of a file of notes, from the one that begins at byte `start`."""
    with open(path, "rb") as file:
        file.seek(start)
        yield from map(json.loads, file)


def line_starts(path: Path, every: int) -> tuple[array, int]:
    """Returns where lines 0, every, 2 x every, ... begin, and the number of lines."""
    starts, count, place = array("q"), 0, 0
    with open(path, "rb") as file:
        for count, line in enumerate(file, 1):
            if count % every == 1 or every == 1:
                starts.append(place)
            place += len(line)
    return starts, count


class LongList(Sequence[Value]):
    """Dataclasses as JSON lines; in memory each takes eight bytes, and as much again for its key."""

    def __init__(self, from_json: Callable[[dict[str, Any]], Value], key: Callable[[Value], str] | None = None) -> None:
        """The list can be sorted by `key`, if there is one."""
        self._from_json, self._key = from_json, key
        self._file = SpooledTemporaryFile(BYTES_IN_MEMORY)  # noqa: SIM115  (it goes with the list)
        self._places, self._keys = array("q"), []
        self._end = 0

    def __del__(self) -> None:
        self._file.close()

    def append(self, value: Value) -> None:
        self._places.append(self._written(value))
        if self._key is not None:
            self._keys.append(self._key(value))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Value:
        return self._from_json(json.loads(self._line(self._places[number])))

    def __setitem__(self, number: int, value: Value) -> None:
        """`value` has the key of the one whose place it takes."""
        self._places[number] = self._written(value)

    def sort(self) -> None:
        order = sorted(range(len(self)), key=self._keys.__getitem__)
        self._places = array("q", (self._places[number] for number in order))
        self._keys = [self._keys[number] for number in order]

    def write(self, path: Path) -> None:
        """Writes the file that `read_lines` reads, whole or not at all."""
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            file.writelines(self._lines())

    def _lines(self) -> Iterator[bytes]:
        return map(self._line, self._places)

    def _line(self, place: int) -> bytes:
        self._file.seek(place)
        return self._file.readline()

    def _written(self, value: Value) -> int:
        place, line = self._end, as_line(value).encode()
        self._file.seek(place)
        self._file.write(line)
        self._end += len(line)
        return place
