"""Errors that a user can fix, with hints; and rules between settings, with the remedy of one that is broken."""

import difflib
import errno
import os
import re
import signal
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Choice = TypeVar("Choice")
Subject = TypeVar("Subject")
OF_PATHS = {
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP), "give another path"),
    **dict.fromkeys((errno.EACCES, errno.EROFS), "give another path, or get permission for this one"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or give another path"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "check its disk, or give another path"),
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EMFILE: "raise the limit of this shell (ulimit -n)",
    errno.EFBIG: "raise the limit of this shell (ulimit -f)",
}
"""Error number of a failed file creation -> remedy."""
_KEY = re.compile(r"\{([\w.]+)(=?)\}")


class UserError(ValueError):
    """An error that a user can fix: the message has the offending value and what to do.

    Commands print it as one line and exit with 2 (see `run_command`).
    """


def not_written(path: str | os.PathLike, error: OSError) -> UserError:
    """The error of a path that cannot be written, with a remedy."""
    reason, remedy = error.strerror or str(error), OF_PATHS.get(error.errno, "give another path")
    return UserError(f"{path} cannot be written: {reason}; {remedy}")


@contextmanager
def library_errors(said: Callable[[str], str]) -> Iterator[None]:
    """Turn any error of a library with untrusted settings or files into a `UserError`: `said` of its first line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # libraries raise any type: TypeError, IndexError, UnboundLocalError, their own
        raise UserError(said(str(error).strip().partition("\n")[0])) from error


class AlreadyReportedError(Exception):
    """Raised in place of a `UserError` that another process prints; see `report_once`."""


class StoppedError(Exception):
    """A signal ended the command, which has shut down properly; the exit code is 128 + signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def nearest(name: str, choices: Iterable[str], likeness: float = 0.6) -> str | None:
    """The choice most similar to `name`, or None if none has this similarity (0 to 1)."""
    return next(iter(difflib.get_close_matches(name, list(choices), n=1, cutoff=likeness)), None)


def did_you_mean(name: str, choices: Iterable[str], otherwise: str = "") -> str:
    """The end of an error message about an unknown name: "; did you mean 'eta'?".

    If no choice is similar: "; " and `otherwise`, or nothing.
    """
    near = nearest(name, choices)
    hint = f"did you mean {near!r}?" if near else otherwise
    return f"; {hint}" if hint else ""


def choose_one(value: Choice, choices: Collection[Choice], complaint: str) -> Choice:
    """`value`, which must be one of `choices`.

    Raises:
        UserError: the complaint, the most similar choice, and all choices.
    """
    if value not in choices:
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise UserError(f"{complaint}{hint or ';'} choose one of {', '.join(map(str, choices))}")
    return value


def nearest_multiples(value: int, factor: int, *, plus: int = 0) -> str:
    """The positive multiples of `factor`, plus `plus`, next to `value`: "96 or 112"."""
    above = plus - (plus - max(value, 1)) // factor * factor
    return f"{above - factor} or {above}" if above - factor >= 1 else f"{above}"


@contextmanager
def report_once() -> Iterator[None]:
    """Let only rank 0 print a UserError that every process of torchrun raises; used within `run_command`."""
    try:
        yield
    except UserError:
        if os.environ.get("RANK", "0") == "0":
            raise
        raise AlreadyReportedError from None


def always(subject: Any) -> bool:
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule(Generic[Subject]):
    """A subject for which `when` is true must satisfy `needs`; otherwise `remedy` is its `UserError`.

    A text names settings by their dotted paths from the subject: `{a.b}` is the value, `{a.b=}` is `a.b=value`.
    """

    when: Callable[[Subject], bool] = always
    needs: Callable[[Subject], bool]
    remedy: str | Callable[[Subject], str]

    def is_broken(self, subject: Subject) -> bool:
        return bool(self.when(subject)) and not self.needs(subject)

    def message(self, subject: Subject) -> str:
        if callable(self.remedy):
            return self.remedy(subject)
        return _KEY.sub(lambda key: (f"{key[1]}=" if key[2] else "") + _shown(subject, key[1]), self.remedy)


def first_broken(rules: Iterable[Rule[Subject]], subject: Subject) -> Rule[Subject] | None:
    """The first broken rule, or None. Later rules may rely on earlier ones: checking stops at the first broken one."""
    return next((rule for rule in rules if rule.is_broken(subject)), None)


def enforce(rules: Iterable[Rule[Subject]], subject: Subject) -> None:
    """Raises UserError with the message of the first rule that `subject` breaks."""
    broken = first_broken(rules, subject)
    if broken is not None:
        raise UserError(broken.message(subject))


def accepted_by(
    check: Callable[[Subject], Any], *, when: Callable[[Subject], bool] = always, where: str = ""
) -> Rule[Subject]:
    """The rule that `check` raises no UserError; the remedy is `where` and the error's message."""

    def complaint(subject: Subject) -> str:
        try:
            check(subject)
        except UserError as error:
            return f"{where}{error}"
        return ""

    return Rule(when=when, needs=lambda subject: not complaint(subject), remedy=complaint)


def _shown(subject: Any, path: str) -> str:
    """The value at a dotted path, in YAML notation."""
    value = subject
    for name in path.split("."):
        value = getattr(value, name)
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)
