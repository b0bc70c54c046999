"""Keeping a process running: it is watched while it lives, ended when it hangs, and started again when it ends."""

import ctypes
import http.client
import os
import resource
import signal
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
from megadit.serve.own_files import keep_files_to_oneself

_SECONDS_BETWEEN_CHECKS = 0.5
SECONDS_TO_ANSWER = 3.0
_PR_SET_PDEATHSIG = 1


def responds(url: str) -> bool:
    """Whether a server says yes there, and soon."""
    try:
        with urllib.request.urlopen(url, timeout=SECONDS_TO_ANSWER) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):  # the latter for what is no HTTP
        return False


def reachable(host: str) -> str:
    """Address at which this machine reaches a server that listens on `host`."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


@dataclass(frozen=True, kw_only=True, slots=True)
class Ailment:
    """Fault of a process that still runs."""

    reason: str
    patience: float
    """Seconds for which it may go on before the process is ended."""


class Child:
    """A process in a group of its own, told to stop when the thread that started it ends for whatever reason."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path | None) -> None:
        """`log` takes its output (None: our own)."""
        output: IO | None = log.open("ab") if log else None
        self.killed_because: str | None = None
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
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
        """Waits until the process ends, or ends its group when it has been ailing for too long; its exit code."""
        ailing_since = None
        while True:
            try:
                return self._process.wait(_SECONDS_BETWEEN_CHECKS)
            except subprocess.TimeoutExpired:
                asked = time.monotonic()  # one that answers nothing lets the question itself take seconds
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
        """Asks it to end, ends its group after so many seconds, and returns its exit code."""
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
            pass  # nobody of the group is left


def _nothing() -> None:
    pass


def _see_its_output() -> str:
    return "see its output"


@dataclass(kw_only=True, slots=True, eq=False)
class OwnedProcess:
    """A context manager that owns one process that serves: started, waited for, watched, stopped; any number of times.

    Enter it in a thread that stays: the process is told to stop when that thread ends.
    """

    command: Sequence[str]
    name: str
    addresses: str
    """Addresses where it serves, for people."""
    ready: str = "is ready"
    """Message for people once `is_ready`."""
    is_ready: Callable[[], bool]
    """Whether it serves."""
    ailment: Callable[[], Ailment | None]
    """Return its fault while it runs, or None."""
    start_seconds: float
    """How long it may take to be ready."""
    stop_seconds: float
    """How long it may take to end once it is told to."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    log: Path | None = None
    """Takes its output (None: our own)."""
    prepare: Callable[[], object] = _nothing
    """Called before every start."""
    clean_up: Callable[[], object] = _nothing
    """Called after every end."""
    complaint: Callable[[], str] = _see_its_output
    """Why it did not start, as far as it said."""
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
        """Raises:
        UserError: if it ends instead of serving, or does not serve in time.
        """
        self.prepare()
        self._child = Child(self.command, environment=self.environment, log=self.log)
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
        """Sends it a signal, if it lives."""
        if self._child is not None:
            self._child.signal(number)

    def wait(self) -> int:
        """Waits until it ends, by itself or because of an ailment; its exit code."""
        assert self._child is not None
        return self._child.wait(self.ailment)

    def stop(self) -> int | None:
        """Lets it finish what it is doing, then ends its group; its exit code. May be called again."""
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
    """Runs a server until it is told to stop, and starts it again when it ends by itself.

    The pause before a restart doubles from 1 s to 60 s, and is 1 s again after `stable_seconds` of service. A server
    that cannot start the first time is not tried again: that is a mistake to mend, not a crash. `stopping` is set by
    whoever ends the server for good, who then stops it until this returns: it may be just about to start.
    """
    pause, is_first, stopping = 1.0, True, stopping or threading.Event()
    while not stopping.is_set():
        began = time.monotonic()
        try:
            with server:
                report(f"{server.name} {server.ready}: {server.addresses}")
                is_first = False
                code = server.wait()
        except (UserError, OSError) as error:  # the latter from a machine that has no room for another process
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


def raise_descriptor_limit() -> int:
    """Lets this process, and what it starts, have as many open files and connections as it may; returns how many."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _prepare_child() -> None:
    """Asks the kernel to stop this process when its parent is gone, however that came about, and lets other users of
    the machine read nothing that it makes: memory that is shared with a stub, results, adapters."""
    keep_files_to_oneself()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    raise_descriptor_limit()
