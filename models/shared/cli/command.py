"""Commands: their options, and how their errors reach the user."""

import argparse
import contextlib
import errno
import functools
import os
import re
import select
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from megadit.models.shared.cli.signals import end_with_parent, exit_code, passed_on, python_module, start_with_us
from megadit.models.shared.errors import OF_PATHS, AlreadyReportedError, StoppedError, UserError, nearest
from megadit.models.shared.resources import memory_in_words, prepare_threads

SIDES = re.compile(r"\s*(\d+)\s*[xX×]\s*(\d+)\s*")
"""Height and width."""
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
_SHARED_MEMORY, _LITTLE = Path("/dev/shm"), 1 << 20


class _Formatter(argparse.HelpFormatter):
    """Fills paragraphs, but leaves those with indented lines (tables, examples) unchanged."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip().split("\n\n")
        filled = [
            part if "\n " in f"\n{part}" else super(_Formatter, self)._fill_text(part, width, indent) for part in parts
        ]
        return "\n\n".join(filled)


class CommandParser(argparse.ArgumentParser):
    """An argparse parser whose errors are `UserError`s, which `run_command` prints in one line.

    Options are never abbreviated; `--num-steps` is read as `--num_steps` if only that exists. Help ends with
    `examples`, command lines.
    """

    def __init__(self, *, examples: Sequence[str] = (), epilog: str = "", **settings: Any) -> None:
        shown = [epilog, "\n".join(["examples:", *(f"  {line}" for line in examples)]) if examples else ""]
        epilog = "\n\n".join(filter(None, shown))
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, epilog=epilog or None, **settings)
        self.examples = tuple(examples)

    def parse_args(self, args: Sequence[str], namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        """The options in `args`.

        Raises:
            UserError: for an argument that is unknown (names the nearest option), missing or malformed.
        """
        if _is_help_asked:
            raise _FoundError(self)
        # positional arguments may stand anywhere among the options; which argparse does not support with subcommands
        parse = self.parse_known_args if self._subparsers else self.parse_known_intermixed_args
        options, unknown = parse(self._sides_apart([self._spelling(argument) for argument in args]), namespace)
        if unknown:
            asked, known = unknown[0].partition("=")[0].lstrip("-"), self._option_string_actions
            # a wrong suggestion is worse than none
            near = nearest(asked, [name.lstrip("-") for name in known], likeness=0.75)
            hint = f"; did you mean {next(name for name in known if name.lstrip('-') == near)!r}?" if near else ""
            self.error(f"unknown argument {unknown[0]!r}{hint}")
        return options

    def _sides_apart(self, args: list[str]) -> list[str]:
        """Splits `--size 64x96` into `--size 64 96`, for options with two integers."""
        apart: list[str] = []
        for argument in args:
            name, _, value = argument.rpartition("=")
            text = value if name else argument
            action = self._option_string_actions.get(name or (apart[-1] if apart else ""))
            has_two_values = action is not None and action.nargs == 2 and getattr(action.type, "__name__", "") == "int"
            if has_two_values and (sides := SIDES.fullmatch(text)):
                apart += [*([name] if name else []), *sides.groups()]
            else:
                apart.append(argument)
        return apart

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}{'' if message.endswith('?') else ';'} see `{self.prog} --help`")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # here, so that `run_command` sees a closed pipe
        super().exit(status, message)

    def _spelling(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        underscored = name[:2] + name[2:].replace("-", "_")
        return underscored + equals + value if underscored in self._option_string_actions else argument


class _FoundError(Exception):
    """Carries the parser that `parser_of` looks for."""


_is_help_asked: list[bool] = []


def parser_of(command: Callable[[], Any]) -> CommandParser | None:
    """The parser of a command, without running the command; None if it has none."""
    _is_help_asked.append(True)
    try:
        command()
    except _FoundError as found:
        return found.args[0]
    finally:
        _is_help_asked.pop()
    return None


def run_command(function: Callable[[list[str]], int | None], argv: list[str], *, is_run: bool = False) -> int:
    """Runs a command and returns its exit code: 2 for a `UserError`, 130 when interrupted, each printed in one line.

    The exit code is 141, without a message, if nobody reads standard output any more (`megadit info PATH | head -1`); a
    command with `is_run` goes on instead. System errors at a path (`OF_PATHS`) are printed like a `UserError`.
    `--debug` is removed from the arguments, and shows the traceback of such errors. Other exceptions are bugs, and
    always show theirs.
    """
    _open_standard_streams()
    if is_run:
        streams = contextlib.redirect_stdout(_Unread(sys.stdout)), contextlib.redirect_stderr(_Unread(sys.stderr))
        with streams[0], streams[1]:
            return run_command(function, argv)
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
            f"{_SHARED_MEMORY} is full, which processes use to exchange data: give the container more "
            "(--shm-size=1g), or let training read its data in its own process (data.num_workers=0)"
        )
    if not isinstance(error, OSError) or error.errno not in OF_PATHS:
        return ""
    what = f"{error.filename} cannot be used: " if error.filename else ""
    return f"{what}{error.strerror}{_left_at(error)}; {OF_PATHS[error.errno]}"


def _is_of_shared_memory(error: OSError | RuntimeError) -> bool:
    """Whether shared memory is full: Python's locks name no path, and torch raises the kernel's message as text."""
    if isinstance(error, OSError):
        is_unnamed = error.errno == errno.ENOSPC and not error.filename and _SHARED_MEMORY.is_dir()
        return is_unnamed and shutil.disk_usage(_SHARED_MEMORY).free < _LITTLE
    return any(words in str(error) for words in ("</torch_", "shared memory (shm)", "Bus error"))


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
    """A stream that discards output once its terminal is closed, its reader gone or its disk full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except OSError:
            with contextlib.suppress(OSError, ValueError):  # buffered output is discarded, too
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


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
