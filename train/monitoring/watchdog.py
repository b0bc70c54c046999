"""Watchdog that reports a hanging or dead rank and its position in the step, and ends the run.

A thread on every rank writes the rank's position to a file in the run's folder, and watches the files of its
neighbours: a file that is no longer updated means a stopped or dead process, a step that no longer advances a hanging
one. The thread then reports that rank, prints the stack of its own rank, and ends the process, so that torchrun or the
batch system restarts the run from its last checkpoint.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from megadit.models.shared.folder_lock import process_stat
from megadit.models.shared.progress import duration

EXIT_CODE = 75
"""Exit code of a rank that ends because another one failed (EX_TEMPFAIL: retry)."""
SECONDS_TO_END = 2.0
"""Maximum time from when a killed process has closed its connections until it is gone, on a busy machine."""


@dataclass(slots=True)
class _Seen:
    note: dict
    since: float


class Watchdog:
    """Watches the ranks of one job while the block is active.

    Args:
        folder: shared by all ranks.
        limit: seconds without progress after which a rank is reported; 0: no watchdog.
    """

    def __init__(self, folder: Path, *, rank: int, world_size: int, limit: float) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._limit = limit
        self._place = {"step": 0, "doing": "starting", "moves": 0}
        self._beats = 0
        self._seen: dict[int, _Seen] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._limit:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write()
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        if self._limit:
            self._thread.join()
            self._file(self._rank).unlink(missing_ok=True)

    def mark(self, step: int, doing: str) -> None:
        """Record the position of this rank, which counts as progress."""
        self._place = {"step": step, "doing": doing, "moves": self._place["moves"] + 1}

    def lost_rank(self) -> str | None:
        """Describe the rank of this machine whose process has died, and its last position; None if all are alive.

        A process closes its connections a moment before it is gone, so this looks for some seconds.
        """
        deadline = time.monotonic() + (SECONDS_TO_END if self._limit else 0.0)
        while (found := self._dead_rank()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _dead_rank(self) -> str | None:
        for rank in range(self._world_size):
            note = self._read(rank) if self._limit else None
            if note and rank != self._rank and note["host"] == socket.gethostname() and not _is_alive(note["pid"]):
                return (
                    f"{_who(rank, note)} died; last heard of {self._age(rank)} before, {_where(note)}, and rank "
                    f"{self._rank} is {_where(self._place)}"
                )
        return None

    # ------------------------------------------------------------------------------------------------- the thread

    def _watch(self) -> None:
        while not self._is_over.wait(min(self._limit / 10, 10.0)):
            self._write()
            if (found := self._stuck()) is not None:
                self._report_and_end(*found)

    def _stuck(self) -> tuple[int, dict, str] | None:
        """(rank, its record, problem) of a rank without updates, or of the one furthest behind if steps hang; or
        None."""
        silent, waiting, is_stuck = [], [], False
        now = time.monotonic()
        for rank in self._neighbours():
            note = self._read(rank)
            if note is None:  # not started, or finished
                self._seen.pop(rank, None)
                continue
            seen = self._seen.get(rank)
            if seen is None or seen.note["moves"] != note["moves"]:
                self._seen[rank] = seen = _Seen(note, now)
                seen.note["beat since"] = now
            elif seen.note["beats"] != note["beats"]:
                seen.note |= {"beats": note["beats"], "beat since": now}
            is_stuck |= now - seen.since > self._limit
            silent.append((now - seen.note["beat since"], rank, note))
            waiting.append((note["step"], note["moves"], rank, note, now - seen.since))
        if not silent:
            return None
        silence, rank, note = max(silent, key=lambda found: found[:2])
        if silence > self._limit or (is_stuck and silence > self._limit / 2):
            return rank, note, f"has given no sign of life for {duration(silence)}"
        if not is_stuck:
            return None
        # soon all ranks wait, for the one that is furthest behind
        *_, rank, note, seconds = min(waiting, key=lambda found: found[:3])
        return rank, note, f"has made no progress for {duration(seconds)}"

    def _neighbours(self) -> list[int]:
        """This rank and the next ones in a ring, so that several watch every rank, and no file is read by all."""
        return sorted({(self._rank + offset) % self._world_size for offset in range(min(self._world_size, 8))})

    def _report_and_end(self, rank: int, note: dict, problem: str) -> None:
        print(
            f"error: {_who(rank, note)} {problem}, while {_where(note)}; rank {self._rank} ends "
            f"(health.watchdog_seconds={self._limit:g}). What rank {self._rank} was doing:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        os._exit(EXIT_CODE)  # the main thread may wait in a collective that cannot be interrupted

    def _write(self) -> None:
        self._beats += 1
        note = {**self._place, "beats": self._beats, "pid": os.getpid(), "host": socket.gethostname()}
        temporary = self._file(self._rank).with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(note), encoding="utf-8")
            temporary.replace(self._file(self._rank))
        except OSError:  # e.g. a full disk, which others report
            return

    def _read(self, rank: int) -> dict | None:
        try:
            return json.loads(self._file(rank).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _age(self, rank: int) -> str:
        """Time since a rank last wrote its file, which it does every few seconds."""
        try:
            return duration(max(0.0, time.time() - self._file(rank).stat().st_mtime))
        except OSError:
            return "some time"

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank{rank:05d}.json"


def _who(rank: int, note: dict) -> str:
    return f"rank {rank} (process {note['pid']} on {note['host']})"


def _where(note: dict) -> str:
    return f"{note['doing']} in step {note['step']}" if note["step"] else note["doing"]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state, *_ = process_stat(pid)
    except (ProcessLookupError, FileNotFoundError):  # the latter: it ended meanwhile
        return False
    except PermissionError:
        return True
    return not state.startswith("Z")
