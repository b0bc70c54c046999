"""Commands: their options, and how their errors reach the user."""

import argparse
import errno
import os
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from megadit.models.shared.cores import prepare_threads
from megadit.models.shared.errors import AlreadyToldError, UserError, did_you_mean

OF_PATHS = {
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR, errno.EISDIR), "give another path"),
    **dict.fromkeys((errno.EACCES, errno.EROFS), "give another path, or yourself the right to it"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room, or give another path"),
}
"""What a system may refuse where files are made -> what helps."""


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
            hint = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unknown argument {unknown[0]!r}{hint}")
        return options

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}{'' if message.endswith('?') else ';'} see `{self.prog} --help`")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # here, so that `run_command` learns of a reader that left
        super().exit(status, message)

    def _spelling(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        underscored = name[:2] + name[2:].replace("-", "_")
        return underscored + equals + value if underscored in self._option_string_actions else argument


def run_command(function: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Runs a command and returns its exit code: 2 for a `UserError`, 130 when interrupted, each told in one line.

    141, in silence, where nobody reads standard output any more (`megadit info PATH | head -1`). What the system
    refuses to do at a path (`OF_PATHS`) is told as a `UserError` is. `--debug` among the arguments is taken out, and
    shows the traceback of such errors instead. Other exceptions are faults of ours and always show theirs.
    """
    debug = "--debug" in argv
    # before torch is there: a GPU that a run fills has no room for gaps between blocks of fixed sizes
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    prepare_threads()
    try:
        code = function([argument for argument in argv if argument != "--debug"]) or 0
        sys.stdout.flush()
        return code
    except AlreadyToldError:
        return 2
    except UserError as error:
        if debug:
            raise
        return _tell(str(error))
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
    except OSError as error:
        if debug or error.errno not in OF_PATHS:
            raise
        what = f"{error.filename} cannot be used: " if error.filename else ""
        return _tell(f"{what}{error.strerror}; {OF_PATHS[error.errno]}")


def _tell(complaint: str) -> int:
    print(f"error: {_in_one_line(complaint)}", file=sys.stderr)
    return 2


def _in_one_line(text: str) -> str:
    """The text with its line breaks, which a user's own values may hold, written as such."""
    return "\\n".join(text.splitlines())


def _lost_its_reader(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream, 0)  # a pipe without a reader reports an error unasked
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def run_module(module: str, *arguments: str) -> None:
    """Runs `python -m module` in a process of its own: training patches torch and starts ranks.

    On Ctrl-C the terminal interrupts that process too; it is given the time to save what it has.

    Raises:
        UserError: if it fails; it has said why.
    """
    process = subprocess.Popen([sys.executable, "-m", module, *arguments])
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait(timeout=60)
        raise
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code:
        raise UserError(f"`python -m {module} {' '.join(arguments)}` ended with exit code {code}; see above")
