"""Rows of Parquet tables, read in a process with limits of memory and time: a few hundred bytes can hold a dictionary
whose value is gigabytes long, or repeated a million times, or a list of as many elements.

Run as a program, it is that process. It reads a question in JSON; its answers are pickles, which only it writes: rows
or numbers, then None, or an error as text.
"""

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

from megadit.models.shared.cli.command import python_module
from megadit.models.shared.errors import UserError
from megadit.train.data.ingest.sources.files import file_size, open_file

MOST_MEMORY = 3 << 30
"""Bytes that reading may take: those of a page and of a batch of rows, compressed and not."""
_PROCESSOR_SECONDS = 60.0
"""Seconds of processor time for a batch of rows, or to count those of a file; the kernel ends a process that takes
more."""
_MOST_ROWS, _BATCH_BYTES = 64, 1 << 26
"""Rows read at once, fewer where rows are large."""
_MOST_UNFOLDED, _FREE_BYTES = 100, 1 << 20
"""Maximum bytes of rows for each byte that they have in the file on average, and in addition to these: pictures and
captions do not compress further."""


def count_rows(paths: Sequence[str]) -> list[int]:
    """Number of rows of each Parquet file; raises as `read_parquet`."""
    counts: list[int] = []
    for count in _replies({"count": list(paths)}, lambda: paths[len(counts)]):
        counts.append(count)
    return counts


def read_parquet(path: str, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows from `start` to `stop` of a Parquet file; only the row groups that hold them are read.

    Raises:
        UserError: if it is none, or broken; if reading it takes too much memory or time; if pyarrow is missing.
    """
    return _replies({"path": path, "start": start, "stop": stop}, lambda: path)


def _replies(question: dict[str, Any], path: Any) -> Iterator[Any]:
    """The answers of a new process; `path` returns the file that it is reading."""
    if find_spec("pyarrow") is None:
        name = PurePosixPath(path()).name
        raise UserError(f"reading {name} needs the library pyarrow; pip install 'megadit[tables]'")
    process = subprocess.Popen(
        python_module("megadit.train.data.ingest.sources.parquet", str(MOST_MEMORY)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # other allocators, and arenas of many threads, reserve more than they use
        env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"},
    )
    try:
        with process.stdin as questions:
            questions.write(json.dumps(question).encode())
        while (answer := pickle.load(process.stdout)) is not None:
            if isinstance(answer, str):
                raise UserError(answer)
            yield answer
    except (OSError, EOFError, pickle.UnpicklingError):
        raise UserError(f"{path()} cannot be read: its reader crashed, or took too long or too much memory") from None
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


# ---------------------------------------------------------------------------------------------- in the other process


def _work(question: dict[str, Any], memory: int) -> Iterator[bytes]:
    """Yields answers; raises UserError for files that cannot be read."""
    for path in question.get("count", ()):
        with _opened(path, memory) as (table, _):
            yield pickle.dumps(sum(_sizes(table)))
    if "path" in question:
        with _opened(path := question["path"], memory) as (table, size):
            num_rows, num_bytes = 0, 0
            for row in map(pickle.dumps, _rows(table, question["start"], question["stop"])):
                num_rows, num_bytes = num_rows + 1, num_bytes + len(row)
                if num_bytes > _MOST_UNFOLDED * size * num_rows // sum(_sizes(table)) + _FREE_BYTES:
                    raise UserError(
                        f"{path} cannot be read: {num_rows:,} rows have {num_bytes:,} bytes, over {_MOST_UNFOLDED} "
                        "times what they have in the file; no pictures and captions do"
                    )
                yield row
    yield pickle.dumps(None)


def _rows(table: Any, start: int, stop: int | None) -> Iterator[dict[str, Any]]:
    ends = list(accumulate(_sizes(table)))
    starts, stop = [0, *ends[:-1]], sum(_sizes(table)) if stop is None else stop
    groups = [n for n, (first, end) in enumerate(zip(starts, ends, strict=True)) if first < stop and end > start]
    number = starts[groups[0]] if groups else 0
    about = [table.metadata.row_group(n) for n in groups]
    widest = max((group.total_byte_size // max(1, group.num_rows) for group in about), default=1)
    size = max(1, min(_MOST_ROWS, _BATCH_BYTES // max(1, widest)))
    for batch in table.iter_batches(batch_size=size, row_groups=groups, use_threads=False):
        rows = batch.slice(max(0, start - number), max(0, stop - max(start, number)))
        number += len(batch)
        for row in range(len(rows)):
            yield from rows.slice(row, 1).to_pylist()
        _start_clock()


def _sizes(table: Any) -> list[int]:
    """Rows of each row group."""
    return [table.metadata.row_group(number).num_rows for number in range(table.num_row_groups)]


@contextmanager
def _opened(path: str, memory: int) -> Iterator[tuple[Any, int]]:
    """(table, bytes of the file)."""
    import pyarrow
    import pyarrow.parquet

    _start_clock()
    try:
        # buffered: a column of a row group is read page by page
        with open_file(path) as file, pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 22) as table:
            rows, size = sum(_sizes(table)), file_size(file)
            if rows > size:
                raise UserError(f"{path} cannot be read: it says that its {size:,} bytes have {rows:,} rows")
            yield table, size
    except MemoryError:  # pyarrow's is an ArrowException, too
        raise UserError(f"{path} cannot be read: a row takes more than {memory:,} bytes of memory") from None
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, LookupError) as error:
        # the last of them for values that Python has none of: times of the year 100,000, or of unknown zones
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}") from None


def _start_clock() -> None:
    signal.setitimer(signal.ITIMER_PROF, _PROCESSOR_SECONDS)  # its signal ends the process


def main() -> None:
    import pyarrow.parquet  # noqa: F401  before the limit, which is for what files take

    memory = int(sys.argv[1])
    is_running = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (is_running + memory,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print; stdout is for responses
    try:
        for answer in _work(json.load(sys.stdin), memory):
            responses.write(answer)
    except UserError as error:
        responses.write(pickle.dumps(str(error)))
    responses.flush()


if __name__ == "__main__":
    main()
