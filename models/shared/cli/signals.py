"""Signals that end a command, the same in every launcher: work in progress is finished; the exit code is 128 +
signal."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megadit.models.shared.errors import StoppedError

WITH_PARENT = "MEGADIT_ENDS_WITH_PARENT"
"""Environment variable that makes a process end when its parent does, for whatever reason."""
_PR_SET_PDEATHSIG = 1


def ending_signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT and, unless it is ignored (nohup), SIGHUP of a closed terminal."""
    asked = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    return [number for number in asked if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def exit_code(returncode: int) -> int:
    """Convert the return code of `subprocess` to a shell's exit code."""
    return returncode if returncode >= 0 else 128 - returncode


class StopRequest:
    """Records whether a signal to end came within the block; a second SIGINT after a second interrupts at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._time = 0.0

    @property
    def has_come(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> "StopRequest":
        # reader processes inherit these handlers: a SIGINT to the whole process group must not end them
        self._previous = {number: signal.signal(number, self._note) for number in ending_signals()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        # torchrun repeats a SIGINT that the terminal has sent already
        if number == signal.SIGINT and self.has_come and time.monotonic() - self._time > 1:
            raise KeyboardInterrupt
        if not self.has_come:
            self.signal, self._time = number, time.monotonic()


@contextmanager
def passed_on(process: subprocess.Popen) -> Iterator[None]:
    """Within the block, signals to end are passed on to `process`, which is waited for; then this process ends, too.

    Raises:
        StoppedError: in the end, if one came.
    """
    came: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        came.append(number)
        if number != signal.SIGINT or not os.isatty(0):  # a terminal sends it to both
            process.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if came:
        raise StoppedError(came[0])


@contextmanager
def cleaning_up() -> Iterator[None]:
    """Within the block, signals to end that would end this process at once raise SystemExit, so that `finally` blocks
    run; forked processes still end at once. Where a finalizer was interrupted, which ignores exceptions, the signal
    comes again."""
    ours, is_main = os.getpid(), threading.current_thread() is threading.main_thread()
    came: list[int] = []
    numbers = [number for number in ending_signals() if is_main and signal.getsignal(number) == signal.SIG_DFL]

    def end(number: int, frame: Any) -> None:
        if os.getpid() == ours:
            came.append(number)
            raise SystemExit(128 + number)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def repeat(ignored: Any) -> None:
        if came and isinstance(ignored.exc_value, SystemExit):
            threading.Timer(0.1, os.kill, [ours, came[-1]]).start()
        else:
            previous(ignored)

    if not numbers:  # of a block around this one, or of the main thread
        yield
        return
    for number in numbers:
        signal.signal(number, end)
    previous, sys.unraisablehook = sys.unraisablehook, repeat
    try:
        yield
    finally:
        sys.unraisablehook = previous
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def python_module(module: str, *arguments: str) -> list[str]:
    """The command of `python -m module` without the current folder in its path: that may be somebody else's data, and
    hold a module of the name `json`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def start_with_us(command: Sequence[str]) -> subprocess.Popen:
    """Start a process that ends when this one does."""
    return subprocess.Popen(command, env={**os.environ, WITH_PARENT: str(os.getpid())})


def end_with_parent() -> None:
    """Have this process ended (SIGTERM) when its parent is gone, if that requested it or is torchrun."""
    parent = os.environ.pop(WITH_PARENT, None)
    if (parent is None and "TORCHELASTIC_RUN_ID" not in os.environ) or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if parent is not None and os.getppid() != int(parent):  # it has already ended
        signal.raise_signal(signal.SIGTERM)
