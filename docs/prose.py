"""Checks of the product's prose: first lines of docstrings, and help texts, that cannot be understood alone.

    python docs/prose.py [FOLDER ...]      each that hangs, as FILE:LINE: TEXT; code 1 where there are any

A text that begins with "Of a CLIP: ..." makes its reader guess the subject. `make lint` runs this over the package.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ("models", "train", "infer", "export", "serve")
HANGS = re.compile(r"(Of|Those|That|As|For|With|What|Which|Whose|Who|By|In|From|Where)\b", re.IGNORECASE)
SAYS_HELP = ("setting", "Setting", "add_argument", "replace")
"""Functions whose `help=`, or second text, is a help text."""


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(Line, text) of each docstring, of attributes and constants too, and of each help text."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            may_begin = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            before = [None if may_begin else node, *body]
            for previous, statement in zip(before, body, strict=False):
                if _is_text(statement) and (previous is None or isinstance(previous, ast.Assign | ast.AnnAssign)):
                    yield statement.lineno, statement.value.value
        if isinstance(node, ast.Call) and _name(node.func) in SAYS_HELP:
            values = [keyword.value for keyword in node.keywords if keyword.arg == "help"] + node.args[1:2]
            yield from ((value.lineno, value.value) for value in values if _is_string(value))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and _is_string(statement.value)


def _is_string(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def hanging(path: Path) -> Iterator[tuple[int, str]]:
    """(Line, first line of the text) of those in a file that hang."""
    for line, text in texts(ast.parse(path.read_text())):
        if HANGS.match(text.strip()):
            yield line, text.strip().splitlines()[0]


def main(folders: list[str]) -> int:
    found = 0
    for folder in folders or PACKAGE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, text in sorted(hanging(path)):
                print(f"{path.relative_to(ROOT)}:{line}: {text}")
                found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
