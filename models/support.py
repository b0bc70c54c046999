"""Small things every side of the package needs: mistakes users can mend, files never half written, progress."""

import argparse
import difflib
import fcntl
import json
import os
import secrets
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO


class UserError(ValueError):
    """A mistake that a user can mend: the message gives the offending value and what to do.

    Commands print it as one line and exit with 2 (see `run_command`).
    """


class AlreadyToldError(Exception):
    """A `UserError` that another process tells; see `told_once`."""


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice most like `name`, or None where nothing is alike."""
    return next(iter(difflib.get_close_matches(name, list(choices), n=1)), None)


def duration(seconds: float) -> str:
    """A length of time in its two largest units: "48 s", "3 min 12 s", "2 h 5 min"."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60} min"


# ---------------------------------------------------------------------------------------------------- files


def _temporary_sibling(path: Path) -> Path:
    """A hidden, unused name in the same directory (so that a rename is atomic) with the same suffix (which writers
    such as imageio read the format from)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")


@contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Gives a temporary name to write a file under; renames it to `path` on success, removes it on any error."""
    path = Path(path)
    temporary = _temporary_sibling(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: str | os.PathLike) -> Iterator[Path]:
    """Gives an empty temporary directory that becomes `path` on success and is removed on any error.

    A directory already at `path` is replaced, and only once the new one is complete: what stands there is always whole.

    Raises:
        UserError: if `path` exists and is not a directory.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; give the name of a directory")
    temporary, replaced = _temporary_sibling(path), _temporary_sibling(path)
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            os.replace(path, replaced)
        os.replace(temporary, path)
    except BaseException:
        if replaced.exists() and not path.exists():
            os.replace(replaced, path)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def held_alone(path: str | os.PathLike) -> Iterator[None]:
    """Waits until no other process holds the file `path`, which is made for that, and holds it within the block.

    Whoever then finds the work done that it came for needs not do it. A process that ends lets go.

    Raises:
        UserError: if the file cannot be made.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_json(path: str | os.PathLike, obj: Any) -> None:
    """Writes `obj` as indented JSON, whole or not at all."""
    text = json.dumps(obj, indent=2, ensure_ascii=False) + "\n"
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: str | os.PathLike) -> Any:
    """The contents of a JSON file.

    Raises:
        UserError: if the file is missing, cannot be read or is not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None


# -------------------------------------------------------------------------------------------------- progress


def _figures_text(figures: dict[str, Any]) -> str:
    """`loss 0.1234  lr 0.008`."""
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )


class Progress:
    """How far a long task has come: a bar on a terminal, else a plain line every few seconds, on standard error.

        with Progress(total, "training") as bar:
            bar.advance(1, loss=0.1, lr=1e-3)

    `completed` is where a resumed task starts; it does not count towards the speed. With `enabled=False` (ranks other
    than the first) nothing is shown. A stream that is not a terminal always gets a last line.
    """

    def __init__(
        self,
        total: int,
        description: str,
        *,
        completed: int = 0,
        enabled: bool = True,
        plain_interval: float = 10.0,
        stream: TextIO | None = None,
    ) -> None:
        self.total = total
        self.description = description
        self.completed = self._first = completed
        self._figures: dict[str, Any] = {}
        self._enabled = enabled
        self._plain_interval = plain_interval
        self._stream = stream or sys.stderr
        self._bar = _terminal_bar(self._stream) if enabled and self._stream.isatty() else None

    def __enter__(self) -> "Progress":
        self._start = self._last_line = time.monotonic()
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self.description, total=self.total, completed=self.completed, figures="")
        return self

    def advance(self, steps: int = 1, **figures: Any) -> None:
        """Counts `steps` more and shows `figures`; figures of earlier calls stay until they are given again."""
        self.completed += steps
        self._figures.update(figures)
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=self.completed, figures=_figures_text(self._figures))
        elif time.monotonic() - self._last_line >= self._plain_interval:
            self._print_line()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._enabled:
            self._print_line()

    def _print_line(self) -> None:
        self._last_line = time.monotonic()
        elapsed = self._last_line - self._start
        done, left = self.completed - self._first, self.total - self.completed
        times = f"{duration(elapsed)} elapsed"
        if done > 0 and left > 0:
            times += f", {duration(elapsed / done * left)} left"
        parts = [f"{self.description}: {self.completed}/{self.total}", _figures_text(self._figures), times]
        print("  ".join(part for part in parts if part), file=self._stream, flush=True)


def _terminal_bar(stream: TextIO):
    from rich import progress  # only needed where somebody looks
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[figures]}"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("<"),
        progress.TimeRemainingColumn(),
        console=Console(file=stream),
        # Printed lines appear above the bar, but output that goes to a file must keep going there.
        redirect_stdout=sys.stdout.isatty(),
    )


# -------------------------------------------------------------------------------------------------- commands


class CommandParser(argparse.ArgumentParser):
    """argparse whose complaints are a `UserError`, so that `run_command` tells them in one line like any other.

    Options are never abbreviated; `--num-steps` is taken for `--num_steps` where only that exists.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_args(self, args: Sequence[str], namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        """The options in `args`.

        Raises:
            UserError: for an argument that is unknown (names the nearest option), missing or malformed.
        """
        # positional arguments may stand anywhere among the options; argparse can not do that with subcommands
        parse = self.parse_known_args if self._subparsers else self.parse_known_intermixed_args
        options, unknown = parse([self._spelling(argument) for argument in args], namespace)
        if unknown:
            near = nearest(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unknown argument {unknown[0]!r}" + (f" (did you mean {near}?)" if near else ""))
        return options

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # here, so that `run_command` learns of a reader that left
        super().exit(status, message)

    def _spelling(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        underscored = name[:2] + name[2:].replace("-", "_")
        return underscored + equals + value if underscored in self._option_string_actions else argument


def run_command(function: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Runs a command and returns its exit code: 2 for a `UserError`, 130 when interrupted, each told in one line.

    141, in silence, where nobody reads standard output any more (`megadit info PATH | head -1`). `--debug` among the
    arguments is taken out, and shows the traceback of such errors instead. Other exceptions are faults of ours and
    always show theirs.
    """
    debug = "--debug" in argv
    try:
        code = function([argument for argument in argv if argument != "--debug"]) or 0
        sys.stdout.flush()
        return code
    except AlreadyToldError:
        return 2
    except UserError as error:
        if debug:
            raise
        print(f"error: {_in_one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if debug:
            raise
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if debug or not _lost_its_reader(sys.stdout):
            raise
        # what is still buffered would fail again when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


@contextmanager
def told_once() -> Iterator[None]:
    """What every process that torchrun started finds wrong alike, the first of them tells: within `run_command`."""
    try:
        yield
    except UserError:
        if os.environ.get("RANK", "0") == "0":
            raise
        raise AlreadyToldError from None


def _in_one_line(text: str) -> str:
    """The text with its line breaks, which a user's own values may hold, written as such."""
    return "\\n".join(text.splitlines())


def _lost_its_reader(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream, 0)  # a pipe without a reader reports an error unasked
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
