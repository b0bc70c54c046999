"""A program of the user's own in a folder that an option names: it is found, and run as such."""

import importlib.util
from pathlib import Path
from types import ModuleType

from megadit.models.shared.errors import UserError

FAILURES = (Exception, SystemExit)
"""Exceptions of a user's program: any, and it may try to end the process that runs it."""


def find_program(directory: str | Path, file: str, *, option: str, defines: str) -> Path:
    """The program in a directory, absolute; `option` named the directory, and `defines` says what it must.

    Raises:
        UserError: if there is none.
    """
    path = Path(directory).absolute() / file
    if not path.is_file():
        raise UserError(f"{option}={directory}: there is no {file}; it defines {defines}")
    return path


def run_program(path: Path) -> ModuleType:
    """Run the program and return its module.

    Raises:
        UserError: if it fails.
    """
    spec = importlib.util.spec_from_file_location(f"megadit_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except FAILURES as error:
        raise UserError(f"{path} fails: {type(error).__name__}: {error}") from error
    return module
