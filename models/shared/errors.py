"""Mistakes that a user can mend, and the hint that names what was meant."""

import difflib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake that a user can mend: the message gives the offending value and what to do.

    Commands print it as one line and exit with 2 (see `run_command`).
    """


class AlreadyToldError(Exception):
    """A `UserError` that another process tells; see `told_once`."""


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice most like `name`, or None where nothing is alike."""
    return next(iter(difflib.get_close_matches(name, list(choices), n=1)), None)


@contextmanager
def told_once() -> Iterator[None]:
    """What every process that torchrun started finds wrong alike, the first of them tells: within `run_command`."""
    try:
        yield
    except UserError:
        if os.environ.get("RANK", "0") == "0":
            raise
        raise AlreadyToldError from None
