"""Checks of the product's words: texts that cannot be understood alone, and retired words in texts and names.

    python docs/prose.py [FOLDER ...]      each fault as FILE:LINE: TEXT; code 1 where there are any

Texts are first lines of docstrings, and help texts: one that begins with "Of a CLIP: ..." makes its reader guess the
subject. The retired words stand in `words.py`. `make lint` runs this over the package.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from words import MOST_NAMES, NEVER_IN_PROSE, RETIRED

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ("models", "train", "infer", "export", "serve")
HANGS = re.compile(r"(Of|Those|That|As|For|With|What|Which|Whose|Who|By|In|From|Where)\b", re.IGNORECASE)
RETIRED_IN_PROSE = re.compile(rf"\b({'|'.join(NEVER_IN_PROSE)})s?\b", re.IGNORECASE)
PARTS_OF_A_NAME = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
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


def faults(path: Path) -> Iterator[tuple[int, str]]:
    """(Line, first line of the text) of each text of a file that hangs or holds a retired word."""
    for line, text in texts(ast.parse(path.read_text(encoding="utf-8"))):
        first = text.strip().partition("\n")[0]
        if HANGS.match(first) or RETIRED_IN_PROSE.search(first):
            yield line, first


def names(tree: ast.Module) -> Iterator[str]:
    """Each name that a file gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def retired(name: str) -> str | None:
    """The retired word in a name, if there is one."""
    return next((word for part in PARTS_OF_A_NAME.findall(name) if (word := part.lower()) in RETIRED), None)


def main(folders: list[str]) -> int:
    """Prints the faults; with all folders, too many names that hold a retired word are one."""
    found, where = 0, {}
    for folder in folders or PACKAGE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            shown = path.relative_to(ROOT)
            for line, text in sorted(faults(path)):
                print(f"{shown}:{line}: {text}")
                found += 1
            where |= {name: shown for name in names(ast.parse(path.read_text(encoding="utf-8"))) if retired(name)}
    if len(where) > MOST_NAMES:
        print(f"{len(where)} names hold a retired word, and at most {MOST_NAMES} may:")
        for name, path in sorted(where.items()):
            print(f"  {name} ({path}): {RETIRED[retired(name)]}")
    return 1 if found or len(where) > MOST_NAMES else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
