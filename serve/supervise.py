"""Supervises a process: it is watched while it runs, ended when it hangs, and restarted when it ends."""

import ctypes
import http.client
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from megadit.models.shared.errors import UserError
from megadit.models.shared.resources import raise_descriptor_limit

_SECONDS_BETWEEN_CHECKS = 0.5
SECONDS_TO_ANSWER = 3.0
_PR_SET_PDEATHSIG = 1


def responds(url: str) -> bool:
    """Whether a server responds with success, within a short timeout."""
    try:
        with urllib.request.urlopen(url, timeout=SECONDS_TO_ANSWER) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):  # the latter for a response that is not HTTP
        return False


def reachable(host: str) -> str:
    """Address at which this machine reaches a server that listens on `host`."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


@dataclass(frozen=True, kw_only=True, slots=True)
class Ailment:
    """Fault of a process that still runs."""

    reason: str
    patience: float
    """Seconds until the process is ended for it."""


class Child:
    """A process in its own group, which gets a signal to stop when the thread that started it ends."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path | None, folder: str | None = None
    ) -> None:
        """`log` is the file for its output (None: the output of this process), `folder` its current folder."""
        output: IO | None = log.open("ab") if log else None
        self.killed_because: str | None = None
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
                preexec_fn=_prepare_child,
            )
        finally:
            if output:
                output.close()

    @property
    def pid(self) -> int:
        """Id of the process, and of its group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def is_alive(self) -> bool:
        return self.exit_code is None

    def wait(self, ailment: Callable[[], Ailment | None]) -> int:
        """Waits until the process ends, or ends its group when a fault lasts too long; returns its exit code."""
        ailing_since = None
        while True:
            try:
                return self._process.wait(_SECONDS_BETWEEN_CHECKS)
            except subprocess.TimeoutExpired:
                asked = time.monotonic()  # the check itself takes seconds if the process does not respond
            found = ailment()
            if found is None:
                ailing_since = None
                continue
            ailing_since = asked if ailing_since is None else ailing_since
            if time.monotonic() - ailing_since > found.patience:
                self.killed_because = found.reason
                self.kill_group()
                return self._process.wait()

    def signal(self, number: int) -> None:
        if self.is_alive():
            self._process.send_signal(number)

    def stop(self, seconds: float) -> int:
        """Asks it to end, kills its group after `seconds`, and returns its exit code."""
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill_group()
        return self._process.wait()

    def kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # no process of the group is left


@dataclass(kw_only=True, slots=True, eq=False)
class OwnedProcess:
    """A context manager that owns one server process: starts, watches and stops it; may be entered repeatedly.

    Enter it in a thread that stays alive: the process gets a signal to stop when that thread ends.
    """

    command: Sequence[str]
    name: str
    addresses: str
    """Its addresses, for messages."""
    ready: str = "is ready"
    """Message once `is_ready`."""
    is_ready: Callable[[], bool]
    """Returns whether it serves."""
    ailment: Callable[[], Ailment | None]
    """Return its fault while it runs, or None."""
    start_seconds: float
    """Timeout of the start."""
    stop_seconds: float
    """Timeout of the end after a signal to stop."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    folder: str | None = None
    """Its current folder (None: that of this process)."""
    log: Path | None = None
    """File for its output (None: the output of this process)."""
    prepare: Callable[[], object] = lambda: None
    """Called before every start."""
    clean_up: Callable[[], object] = lambda: None
    """Called after every end."""
    complaint: Callable[[], str] = lambda: "see its output"
    """Returns why it did not start, from its output."""
    _child: Child | None = field(default=None, init=False)

    @property
    def pid(self) -> int:
        """Id of the process, and of its group."""
        assert self._child is not None
        return self._child.pid

    @property
    def killed_because(self) -> str | None:
        return self._child.killed_because if self._child else None

    def __enter__(self) -> "OwnedProcess":
        """Raises UserError if it ends instead of serving, or does not serve in time."""
        self.prepare()
        self._child = Child(self.command, environment=self.environment, log=self.log, folder=self.folder)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def is_alive(self) -> bool:
        return self._child is not None and self._child.is_alive()

    def signal(self, number: int) -> None:
        """Sends it a signal, if it runs."""
        if self._child is not None:
            self._child.signal(number)

    def wait(self) -> int:
        """Waits until it ends, by itself or because of an ailment; returns its exit code."""
        assert self._child is not None
        return self._child.wait(self.ailment)

    def stop(self) -> int | None:
        """Lets it finish its work, then ends its group; returns its exit code. May be called again."""
        if self._child is None:
            return None
        try:
            return self._child.stop(self.stop_seconds)
        finally:
            self.clean_up()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.start_seconds
        while not self.is_ready():
            if not self.is_alive():
                raise UserError(f"{self.name} ended with code {self._child.exit_code}: {self.complaint()}")
            if time.monotonic() > deadline:
                raise UserError(f"{self.name} was not ready within {self.start_seconds:.0f} s: {self.complaint()}")
            time.sleep(0.05)


def keep_running(
    server: OwnedProcess,
    *,
    report: Callable[[str], None],
    stopping: threading.Event | None = None,
    stable_seconds: float = 60,
) -> int:
    """Runs a server until `stopping` is set, and restarts it when it ends by itself.

    The pause before a restart doubles from 1 s to 60 s, and is 1 s again after `stable_seconds` of service. A server
    that fails at its first start is not restarted: that is an error of configuration, not a crash. The caller sets
    `stopping` and then stops the server repeatedly until this returns, since it may be about to start.
    """
    pause, is_first, stopping = 1.0, True, stopping or threading.Event()
    while not stopping.is_set():
        began = time.monotonic()
        try:
            with server:
                report(f"{server.name} {server.ready}: {server.addresses}")
                is_first = False
                code = server.wait()
        except (UserError, OSError) as error:  # the latter if no process can be created
            if is_first and not stopping.is_set():
                raise
            code = error
        if stopping.is_set():
            break
        pause = 1.0 if time.monotonic() - began > stable_seconds else pause
        report(f"{server.name} ended ({server.killed_because or code}); starting it again in {pause:.0f} s")
        stopping.wait(pause)
        pause = min(2 * pause, 60.0)
    return 0


def print_on_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _prepare_child() -> None:
    """Makes the kernel stop this process when its parent ends, and its files unreadable to other users: memory shared
    with a stub, results, adapters."""
    keep_files_to_oneself()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    raise_descriptor_limit()


# Protects the files of a process and its children from other users, even if its libraries change modes.
# Triton's Python backend creates shared memory (for prompts and videos) with boost, which overrides the umask by
# `fchmod`. Here files keep the mode with which they were opened.

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_FCHMOD = {"x86_64": (0xC000003E, 91), "aarch64": (0xC00000B7, 52)}
"""Machine -> its number in the kernel's audit.h, and the number of the system call `fchmod`."""
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _DO_NOTHING = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE = 0, 4
"""Offsets in the kernel's `seccomp_data`."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def keep_files_to_oneself() -> None:
    """Make this process and its children create files that others cannot open, and forbid `fchmod`.

    If the kernel does not support seccomp filters, only the umask is set.
    """
    os.umask(0o077)
    machine, fchmod = _FCHMOD.get(os.uname().machine, (0, 0))
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_IF_EQUAL, 0, 3, machine),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_IF_EQUAL, 0, 1, fchmod),
        (_RETURN, 0, 0, _DO_NOTHING),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    program = _Program(len(instructions), ctypes.cast(code, ctypes.c_void_p).value)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # required for unprivileged processes
    libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0)
