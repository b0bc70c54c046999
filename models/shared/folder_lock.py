"""A lock for one writer of a folder at a time, across machines that share its file system.

    with FolderLock(folder, "trains") as lock:
        lock.check()          # before each write: a run that lost the folder writes nothing more

`lock.json` names the holder and is updated every few seconds (heartbeat). If the holder's process is gone, or has been
silent for long, the next process takes the folder over. A suspended holder that wakes finds another name there, and
ends. This needs no locks of the file system, which shared ones often lack.
"""

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from megadit.models.shared.errors import UserError, not_written
from megadit.models.shared.files import check_local

FILE = "lock.json"
LOST_CODE = 2
"""Exit code of a process that lost its folder."""
_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 30.0
"""Seconds without heartbeat after which a holder on another machine is assumed gone or suspended."""
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


@dataclass(slots=True)
class _Watched:
    beats: Any
    since: float


class FolderLock:
    """Holds `folder` while the block is active.

    Raises:
        UserError: if another process holds it, or its file cannot be written.
    """

    def __init__(self, folder: str | os.PathLike, does: str, *, path: Path | None = None) -> None:
        """`does` describes the holder's work: "trains"; `path` is the lock file, if not in the folder."""
        self._folder, self._path = Path(folder), path or Path(folder) / FILE
        self._record = {"token": secrets.token_hex(8), "does": does, "beats": 0, **_this_process()}
        self._guards: dict[tuple[int, int], float] = {}
        """Identity of each guard file (`_remove`) -> time when it was first seen."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="folder lock", daemon=True)

    def __enter__(self) -> "FolderLock":
        check_local(self._folder)
        self._made = not self._path.parent.exists()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._acquire()
        except (FileExistsError, NotADirectoryError) as error:
            reason = f"{self._path.parent} is not a folder"
            raise UserError(f"{self._folder} cannot be used: {reason}; give another path") from error
        except OSError as error:
            raise not_written(self._path, error) from error
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            found = _read(self._path)
            if found is not None and found["token"] == self._record["token"]:
                self._path.unlink()
                if self._made:  # removes it only if empty
                    self._path.parent.rmdir()

    def check(self) -> None:
        """Ends this process immediately, without a clean-up that would write, if another holds the folder."""
        try:
            other = _read(self._path)
        except OSError:  # the file system is unavailable, as for later writes
            return
        if other is not None and other["token"] == self._record["token"]:
            return
        taken = f"{_who(other)} has it now" if other and other["token"] else f"{self._path.name} was removed"
        print(
            f"error: {self._folder} is no longer this process's: {taken}, while this one was suspended, or its "
            "file system was away; it ends and writes nothing more",
            file=sys.stderr,
            flush=True,
        )
        os._exit(LOST_CODE)

    def _acquire(self) -> None:
        watched: dict[str, _Watched] = {}
        while not self._put():
            other = _read(self._path)
            if other is None:  # removed meanwhile
                continue
            if other["token"] is None:
                self._remove(None)
            elif _is_gone(other) or self._is_silent(other, watched):
                print(f"{self._folder}: taken over from {_who(other)}, which is gone", flush=True)
                self._remove(other["token"])

    def _put(self) -> bool:
        """Create the lock file and return whether it did not exist; linking is atomic on shared file systems, too."""
        temporary = self._path.with_name(f".{self._path.name}.{self._record['token']}")
        try:
            _write(temporary, self._record)
            os.link(temporary, self._path)
            return True
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)

    def _remove(self, token: str | None) -> None:
        """Removes a dead holder's file, or a damaged one (`token` None), by one process at a time: otherwise a slower
        one could remove the file of its successor."""
        guard = self._path.with_name(f".{self._path.name}.removing")
        try:
            guard.open("x").close()
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                about, now = guard.stat(), time.monotonic()  # a monotonic clock: others may jump
                if now - self._guards.setdefault((about.st_ino, about.st_mtime_ns), now) > _SILENT_SECONDS:
                    guard.unlink()  # left by a process that ended
            time.sleep(0.01)
            return
        try:
            found = _read(self._path)
            if found is not None and found["token"] == token:
                self._path.unlink(missing_ok=True)
        finally:
            guard.unlink(missing_ok=True)

    def _is_silent(self, other: dict, watched: dict[str, _Watched]) -> bool:
        """Wait for, and return, whether a holder on another machine has sent no heartbeat for long.

        Raises:
            UserError: if it is alive.
        """
        if _is_here(other):
            raise self._refusal(other)
        if other["token"] not in watched:
            watched[other["token"]] = _Watched(other["beats"], time.monotonic())
            print(f"{self._folder}: waiting to see whether {_who(other)} is still alive", flush=True)
        seen = watched[other["token"]]
        if seen.beats != other["beats"]:
            raise self._refusal(other)
        if time.monotonic() - seen.since > _SILENT_SECONDS:
            return True
        time.sleep(_BEAT_SECONDS / 5)
        return False

    def _refusal(self, other: dict) -> UserError:
        return UserError(
            f"{self._folder} is in use: {_who(other)} {other['does']} there since {other['since']}. Wait for its "
            f"end, stop it (`kill {other['pid']}` on {other['host']}), or take the folder from it, which ends it when "
            f"it next writes: rm {self._path}"
        )

    def _beat(self) -> None:
        while not self._is_over.wait(_BEAT_SECONDS):
            self.check()  # a resumed process gets here first
            self._record["beats"] += 1
            with contextlib.suppress(OSError):  # a full disk is reported elsewhere
                _write(self._path, self._record, anew=False)


def _this_process() -> dict[str, Any]:
    job = next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)), None)
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process": _process(os.getpid()),
        "kernel": _kernel(),
        "job": job,
        "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def _kernel() -> list[str]:
    """Identifies the namespace of process ids: the boot of the machine, and the container."""
    try:
        return [
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    except OSError:
        return [socket.gethostname()]


def process_stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the name, which may be any bytes: state, parent, ... (proc(5)).

    Raises:
        OSError: if there is no such process.
    """
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _process(pid: int) -> str | None:
    """Start time of a process, to detect reuse of its id; None if there is none."""
    try:
        state, *values = process_stat(pid)
    except OSError:
        return None
    return None if state in "ZX" else values[18]


def _is_here(other: dict) -> bool:
    return other["kernel"] == _kernel()


def _is_gone(other: dict) -> bool:
    return _is_here(other) and _process(other["pid"]) != other["process"]


def _who(other: dict) -> str:
    job = f", job {other['job']}" if other["job"] else ""
    return f"process {other['pid']} on {other['host']}{job}"


def _read(path: Path) -> dict | None:
    """The lock record; None without a file. It is read again while a heartbeat is being written; one that stays damaged
    has no token."""
    for _ in range(3):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            record["token"], record["beats"], record["pid"], record["host"], record["kernel"], record["process"]
            return record
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            time.sleep(0.05)
    return {"token": None}


def _write(path: Path, record: dict, *, anew: bool = True) -> None:
    """Write `record` at a fixed length, in one write, and flush it to the disk."""
    descriptor = os.open(path, os.O_WRONLY | (os.O_CREAT if anew else 0), 0o644)
    try:
        os.pwrite(descriptor, json.dumps(record).ljust(1024).encode(), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
