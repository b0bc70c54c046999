"""JSON lines: files of records, and lists of millions of them in a temporary file instead of memory."""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO, TypeVar

from megadit.models.shared.files import atomic_path

Value = TypeVar("Value")
BYTES_IN_MEMORY = 1 << 22
"""Maximum bytes of a list in memory; a longer one is moved to a temporary file (TMPDIR)."""
_encode = json.JSONEncoder(ensure_ascii=False).encode


def to_json(value: Any) -> Any:
    """Convert like `dataclasses.asdict`, but without copies, in half the time."""
    if isinstance(value, tuple):
        return tuple(map(to_json, value))
    names = getattr(type(value), "__dataclass_fields__", ())
    return {name: to_json(getattr(value, name)) for name in names} if names else value


def write_lines(path: Path, values: Iterable[Any]) -> None:
    """Write dataclasses as JSON lines, atomically."""
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


class Lines(Sequence[Value]):
    """Sequence over a file of JSON lines that are read on access; a line takes eight bytes of memory."""

    def __init__(self, file: BinaryIO, places: array, from_json: Callable[[Any], Value]) -> None:
        """`places`: where the lines begin."""
        self._file, self._places, self._from_json = file, places, from_json

    @classmethod
    def open(cls, path: Path, from_json: Callable[[Any], Value]) -> "Lines[Value]":
        return cls(open(path, "rb"), line_starts(path, 1)[0], from_json)  # noqa: SIM115  (it goes with the list)

    def __del__(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int | slice) -> Value | list[Value]:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        return self._from_json(json.loads(self._line(self._places[number])))

    def _line(self, place: int) -> bytes:
        self._file.seek(place)
        return self._file.readline()


class LongList(Lines[Value]):
    """List of values as JSON lines in a temporary file; sort keys are in memory."""

    def __init__(self, from_json: Callable[[Any], Value], key: Callable[[Value], Any] | None = None) -> None:
        """The list can be sorted by `key`, if there is one."""
        super().__init__(SpooledTemporaryFile(BYTES_IN_MEMORY), array("q"), from_json)
        self._key, self._keys, self._end = key, [], 0

    def append(self, value: Value) -> None:
        self._places.append(self._written(value))
        if self._key is not None:
            self._keys.append(self._key(value))

    def extend(self, values: Iterable[Value]) -> None:
        for value in values:
            self.append(value)

    def __setitem__(self, number: int, value: Value) -> None:
        """Replace a value by one with the same key."""
        self._places[number] = self._written(value)

    def sort(self) -> None:
        order = sorted(range(len(self)), key=self._keys.__getitem__)
        self._places = array("q", (self._places[number] for number in order))
        self._keys = [self._keys[number] for number in order]

    def write(self, path: Path) -> None:
        """Write a file for `read_lines`, atomically."""
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            file.writelines(map(self._line, self._places))

    def _written(self, value: Value) -> int:
        place, line = self._end, as_line(value).encode()
        self._file.seek(place)
        self._file.write(line)
        self._end += len(line)
        return place
