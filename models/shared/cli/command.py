"""A command as a process: how it starts, how its errors reach the user, and how it ends.

Signals that end it are the same in every launcher: work in progress is finished; the exit code is 128 + signal.
"""

import contextlib
import ctypes
import errno
import functools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from megadit.models.shared.errors import OF_PATHS, AlreadyReportedError, StoppedError, UserError
from megadit.models.shared.resources import memory_in_words, prepare_threads

_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
_SHARED_MEMORY, _LITTLE = Path("/dev/shm"), 1 << 20
_OF_SHARED_MEMORY = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOSYS)
_HOMELESS = "Could not determine home directory."
"""Python's words, in any library, where HOME is unset and the user id has no name, as in containers."""
WITH_PARENT = "MEGADIT_ENDS_WITH_PARENT"
"""Environment variable that makes a process end when its parent does, for whatever reason."""
_PR_SET_PDEATHSIG = 1


def run_command(function: Callable[[list[str]], int | None], argv: list[str], *, is_run: bool = False) -> int:
    """Runs a command and returns its exit code: 2 for a `UserError`, 130 when interrupted, each printed in one line.

    The exit code is 141, without a message, if nobody reads standard output any more (`megadit info PATH | head -1`); a
    command with `is_run` goes on instead, as every command does where standard error cannot be written. System errors
    at a path (`OF_PATHS`) are printed like a `UserError`.
    `--debug` is removed from the arguments, and shows the traceback of such errors. Other exceptions are bugs, and
    always show theirs.
    """
    _open_standard_streams()
    with contextlib.ExitStack() as streams:
        streams.enter_context(contextlib.redirect_stderr(_Unread(sys.stderr, needs_reader=not is_run)))
        streams.enter_context(contextlib.redirect_stdout((_Unread if is_run else _Output)(sys.stdout)))
        return _run_command(function, argv)


def _run_command(function: Callable[[list[str]], int | None], argv: list[str]) -> int:
    try:
        os.getcwd()
    except FileNotFoundError:  # some libraries of torch end the process without a folder to be in
        return _print_error("the current folder was removed; change to another, and run the command again")
    if wrong := next((each for each in _OF_RANKS if not os.environ.get(each, "0").isdecimal()), None):
        return _print_error(
            f"{wrong}={os.environ[wrong]!r} in the environment is no whole number, which torchrun sets for each rank; "
            "unset it, or start the ranks with torchrun"
        )
    end_with_parent()
    debug = "--debug" in argv
    # before torch is there: expandable segments avoid fragmentation
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    prepare_threads()
    try:
        with _warnings_in_a_line():
            code = function([argument for argument in argv if argument != "--debug"]) or 0
        sys.stdout.flush()
        return code
    except AlreadyReportedError:
        return 2
    except StoppedError as error:
        return error.exit_code
    except UserError as error:
        if debug:
            raise
        return _print_error(str(error))
    except KeyboardInterrupt:
        if debug:
            raise
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if debug or not _lost_its_reader(sys.stdout):
            raise
        # what is still buffered would fail again at interpreter exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):  # with which consoles of rich end the process
            raise
        return 141
    except (OSError, RuntimeError) as error:
        if debug or not (message := _system_message(error)):
            raise
        return _print_error(message)


def entry_point(function: Callable[[list[str]], int | None], *, is_run: bool = False) -> Callable[..., int]:
    """Turns a function of arguments into a command, which takes those of the process by default: see `run_command`."""

    @functools.wraps(function)
    def main(argv: list[str] | None = None) -> int:
        return run_command(function, sys.argv[1:] if argv is None else argv, is_run=is_run)

    return main


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Within, our warnings (`UserWarning`) are printed without the line of code that gave them."""
    usual = warnings.formatwarning

    def in_a_line(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> str:
        return f"warning: {message}\n" if category is UserWarning else usual(message, category, *where, **line)

    warnings.formatwarning = in_a_line
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _system_message(error: OSError | RuntimeError) -> str:
    """Explain a system error; "" for other errors."""
    if _is_of_shared_memory(error):
        return (
            f"{_SHARED_MEMORY} is full or cannot be written, which processes use to exchange data: give the container "
            "more (--shm-size=1g), or let training read its data in its own process (data.num_workers=0)"
        )
    if str(error) == _HOMELESS:
        return "this user has no home folder; set HOME to one that may be written to"
    if not isinstance(error, OSError) or error.errno not in OF_PATHS:
        return ""
    what = f"{error.filename} cannot be used: " if error.filename else ""
    return f"{what}{error.strerror}{_left_at(error)}; {OF_PATHS[error.errno]}"


def _is_of_shared_memory(error: OSError | RuntimeError) -> bool:
    """Whether shared memory is full or cannot be written: Python's locks name no path, its buffers one of their own,
    and torch raises the kernel's message as text."""
    if not isinstance(error, OSError):
        return any(words in str(error) for words in ("</torch_", "shared memory (shm)", "Bus error"))
    if error.filename:
        return re.fullmatch(rf"{_SHARED_MEMORY}(/pym-.*)?", str(error.filename)) is not None
    is_usable = os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free >= _LITTLE
    return error.errno in _OF_SHARED_MEMORY and not is_usable


def _left_at(error: OSError) -> str:
    """The free space of a full disk, for messages."""
    if error.errno != errno.ENOSPC:
        return ""
    places = [Path(os.fsdecode(error.filename or ".")).absolute(), Path.cwd()]
    folder = next(place for start in places for place in (start, *start.parents) if place.is_dir())
    return f" ({memory_in_words(shutil.disk_usage(folder).free)} left on the disk of {folder})"


def _open_standard_streams() -> None:
    """Opens those that were closed (`>&-`) on /dev/null: else files that are opened later would take their numbers, and
    what libraries print."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                os.fstat(number)
                continue
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, mode, closefd=False))


def _print_error(complaint: str) -> int:
    print(f"error: {_in_one_line(complaint)}", file=sys.stderr)
    return 2


def _in_one_line(text: str) -> str:
    """The text with line breaks and commands to a terminal escaped: a user's values and files may contain them."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in "\\n".join(text.splitlines()))


def _lost_its_reader(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream, 0)  # a pipe without a reader always reports an error
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


class _Unread:
    """A stream that discards output once its terminal is closed, its disk full, or, unless it `needs_reader`, its
    reader gone."""

    def __init__(self, stream: TextIO, *, needs_reader: bool = False) -> None:
        self._stream, self._needs_reader = stream, needs_reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def close(self) -> None:
        """Does nothing: at exit, absl closes a stream that it does not know as Python's."""

    def _try(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except OSError as error:
            if self._needs_reader and isinstance(error, BrokenPipeError):
                raise
            with contextlib.suppress(OSError, ValueError):  # buffered output is discarded, too
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        pass


class _Output(_Unread):
    """Standard output, for its reader or a file: a command that cannot write it fails.

    Raises:
        UserError: if its disk is full, or is out of order.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, needs_reader=True)

    def _lost(self, error: OSError) -> None:
        raise UserError(f"standard output cannot be written: {error.strerror}; give it another file") from error


# --- signals that end a command, and processes that end with it -------------------------------------------------------


def ending_signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT and, unless it is ignored (nohup), SIGHUP of a closed terminal."""
    asked = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    return [number for number in asked if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


@contextlib.contextmanager
def ending_signals_to(handler: Callable[[int, Any], None] | signal.Handlers) -> Iterator[None]:
    """Within the block, signals to end call `handler`, or do what is asked for."""
    before = {number: signal.signal(number, handler) for number in ending_signals()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


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


def interrupt_at_ending_signals() -> None:
    """Makes each of them raise KeyboardInterrupt in the main thread, as Ctrl-C does, from now on."""

    def interrupt(number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)  # a closed terminal sends it several times
        raise KeyboardInterrupt

    for number in ending_signals():
        signal.signal(number, interrupt)


@contextlib.contextmanager
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

    with ending_signals_to(pass_on):
        yield
    if came:
        raise StoppedError(came[0])


@contextlib.contextmanager
def cleaning_up() -> Iterator[None]:
    """Within the block, signals to end that would end this process at once raise SystemExit, so that `finally` blocks
    run; forked processes still end at once. Where a finalizer was interrupted, which ignores exceptions, the signal
    comes again."""
    ours, is_main = os.getpid(), threading.current_thread() is threading.main_thread()
    came: list[int] = []
    numbers = [number for number in ending_signals() if is_main and signal.getsignal(number) == signal.SIG_DFL]

    def end(number: int, frame: Any) -> None:
        if os.getpid() == ours:
            if number == signal.SIGHUP and number in came:  # a closed terminal sends it several times
                return
            came.append(number)
            raise SystemExit(128 + number)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def repeat(ignored: Any) -> None:
        if came and isinstance(ignored.exc_value, SystemExit):
            threading.Timer(0.1, os.kill, [ours, came.pop()]).start()
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


def run_module(module: str, *arguments: str) -> None:
    """Runs `python -m module` in its own process: training patches torch and starts ranks.

    Signals to end are passed on to that process, which has time to save its state.

    Raises:
        UserError: if it fails; it has printed the reason.
        StoppedError: if a signal came.
    """
    process = start_with_us(python_module(module, *arguments))
    with passed_on(process):
        code = exit_code(process.wait())
    if code > 128:  # only that process got the signal
        raise StoppedError(code - 128)
    if code:
        raise UserError(f"`python -m {module} {' '.join(arguments)}` ended with exit code {code}; see above")
