"""Finds and executes a user program in a folder that an option names."""

import importlib.util
from pathlib import Path
from types import ModuleType

from megadit.models.shared.errors import UserError

FAILURES = (Exception, SystemExit)
"""Exceptions of a user program: any, including an exit of the process."""


def find_program(directory: str | Path, file: str, *, option: str, defines: str) -> Path:
    """The program in a directory, as an absolute path; `option` and `defines` are for the error message.

    Raises:
        UserError: if there is none.
    """
    path = Path(directory).absolute() / file
    if not path.is_file():
        raise UserError(f"{option}={directory}: there is no {file}, which must define {defines}")
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
