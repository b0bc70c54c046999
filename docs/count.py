"""How far a reader has to go: files and lines behind each question, rooms, cycles, and very short files.

    python docs/count.py            # prints the table
    python docs/count.py --write    # also writes it into docs/architecture.md

A question starts at some functions or classes. Whatever of this package their code names, annotations included, is
followed, definition by definition, until nothing new comes; each counts with all of its lines, a class as a whole. Only
models/shared/ is left out.
"""

import ast
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("models", "infer", "train", "export", "serve")
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- counted by docs/count.py -->", "<!-- end of what was counted -->"


@dataclass(frozen=True, kw_only=True)
class Question:
    asks: str
    starts: tuple[str, ...]
    """module:definition"""
    most_files: int
    most_lines: int


BEYOND = ("models/shared/",)
"""Errors and files, which every question meets; nothing else is left out."""
NAMED = 5
"""Files that a row of the table names."""

QUESTIONS = (
    Question(
        asks="What is the loss?",
        starts=("train/objectives/losses.py:edm_loss",),
        most_files=8,
        most_lines=1200,
    ),
    Question(
        asks="How does Heun's solver step?",
        starts=("infer/sampling/samplers.py:heun",),
        most_files=1,
        most_lines=60,
    ),
    Question(
        asks="What does a block compute, down to its attention?",
        starts=("models/networks/blocks.py:DiTBlock",),
        most_files=8,
        most_lines=1600,
    ),
    Question(
        asks="Which tensor is split how over ranks?",
        starts=("models/megatron/parallelize.py:shard_parameters",),
        most_files=6,
        most_lines=900,
    ),
    Question(
        asks="What do ranks send one another in a forward?",
        starts=("models/megatron/parallelize.py:connect_ranks",),
        most_files=27,
        most_lines=2700,
    ),
)


@dataclass(frozen=True)
class Source:
    """A file's definitions, and where its names come from."""

    path: str
    num_lines: int
    definitions: dict[str, ast.AST]
    imports: dict[str, tuple[str, str]]
    """Name here -> (file of ours, name there); "" for the module itself."""


SHORT = {
    "infer/hooks/user_program.py": "shared by the hooks of a filter and of a judge",
    "infer/inference_dit_model.py": "a name that users of NeMo type",
    "models/configs/adapter.py": "settings, free of torch",
    "models/megatron/extensions.py": "asked before a run starts, without Megatron",
    "serve/examples/with_megadit.py": "a program to copy",
    "serve/examples/with_openai.py": "a program to copy",
    "train/demos/digits/samples.py": "a data set, written like that of shapes",
    "train/data/ingest/clips/flow.py": "imports torch, which a scan otherwise does without",
    "serve/backend/triton_instance.py": "shared by both models of the Python backend",
    "serve/forms.py": "shared by the gateway and the page",
    "train/pretrain_dit_model.py": "a name that users of DFM type",
    "train/objectives/heads.py": "read by the plan, without Megatron",
    "train/checkpoints/sampling_defaults.py": "shared by validation and bundles",
}
"""Why a file has fewer than 40 lines."""


def files() -> list[str]:
    """All Python files of the five folders, relative to the repository."""
    return sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@cache
def source(path: str) -> Source:
    text = (ROOT / path).read_text(encoding="utf-8")
    definitions: dict[str, ast.AST] = {}
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        definitions[name.id] = node
    found = {name: (file, there) for name, (file, there, _) in _imports(path)}
    return Source(path, len(text.splitlines()), definitions, found)


@cache
def _imports(path: str) -> list[tuple[str, tuple[str, str, bool]]]:
    """(name here, (file of ours, name there, whether it is imported when the file is)) of each import of ours."""
    found = []
    for node, at_once in statements(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megadit"):
            for alias in node.names:
                here = alias.asname or alias.name
                if module := _file(f"{node.module}.{alias.name}"):
                    found.append((here, (module, "", at_once)))
                elif module := _file(node.module):
                    found.append((here, (module, alias.name, at_once)))
    return found


_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def statements(module: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """Each statement, outer ones first, and whether it runs when the file is imported."""
    waiting = deque((node, True) for node in module.body)
    while waiting:
        node, at_once = waiting.popleft()
        yield node, at_once
        children = (child for child in ast.iter_child_nodes(node) if isinstance(child, _STATEMENTS))
        waiting += [(child, at_once and not isinstance(node, _FUNCTIONS)) for child in children]


@cache
def _file(module: str) -> str | None:
    path = module.removeprefix("megadit").replace(".", "/").strip("/")
    for name in (f"{path}.py", f"{path}/__init__.py"):
        if path and (ROOT / name).is_file():
            return name
    return None


def closure(question: Question) -> set[tuple[str, str]]:
    """(file, definition) of all that a reader of this question meets."""
    waiting, seen = [tuple(start.split(":")) for start in question.starts], set()
    while waiting:
        path, name = waiting.pop()
        if (path, name) in seen or path.startswith(BEYOND):
            continue
        seen.add((path, name))
        here = source(path)
        if name not in here.definitions:
            waiting += [here.imports[name]] if name in here.imports else []
            continue
        waiting += _named(here, here.definitions[name])
    return {(path, name) for path, name in seen if name in source(path).definitions}


def _named(here: Source, definition: ast.AST) -> Iterator[tuple[str, str]]:
    """(file, name) of the definitions of ours that a definition names."""
    decorators = {part for above in getattr(definition, "decorator_list", ()) for part in ast.walk(above)}
    for node in ast.walk(definition):
        if node in decorators:  # where it is registered
            continue
        if isinstance(node, ast.Name):
            if node.id in here.definitions:
                yield here.path, node.id
            elif here.imports.get(node.id, ("", ""))[1]:
                yield here.imports[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            file, there = here.imports.get(node.value.id, ("", ""))
            if file and not there:  # of a module
                yield file, node.attr


def count(question: Question) -> tuple[int, int, dict[str, int]]:
    """(files, lines, lines of each file) of the definitions behind a question."""
    nodes = {}
    for path, name in closure(question):
        node = source(path).definitions[name]
        nodes[path, node.lineno] = node.end_lineno - node.lineno + 1
    lines = {path: sum(count for (there, _), count in nodes.items() if there == path) for path, _ in sorted(nodes)}
    return len(lines), sum(lines.values()), lines


def cycles() -> list[list[str]]:
    """Groups of files that import one another when they are imported."""
    graph = {path: {file for _, (file, _, at_once) in _imports(path) if at_once} for path in files()}
    return [group for group in _groups(graph) if len(group) > 1]


def _groups(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components (Tarjan 1972), each after those that it leads to."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(path: str) -> None:
        index[path] = low[path] = len(index)
        stack.append(path)
        for other in graph[path]:
            if other not in index:
                visit(other)
                low[path] = min(low[path], low[other])
            elif other in stack:
                low[path] = min(low[path], index[other])
        if low[path] == index[path]:
            members = [stack.pop()]
            while members[-1] != path:
                members.append(stack.pop())
            found.append(sorted(members))

    for path in graph:
        if path not in index:
            visit(path)
    return found


@dataclass(frozen=True)
class Room:
    """A folder: the Python files at its root, how many of its units stand on one another, and circles of units."""

    num_files: int
    num_floors: int
    circles: list[list[str]]


def rooms() -> dict[str, Room]:
    """Folder -> its room; a unit is a file at its root, or a folder in it, and imports within functions count, too."""
    graphs: dict[str, dict[str, set[str]]] = {}
    for path in files():
        here = path.split("/")
        for depth in range(1, len(here)):
            graphs.setdefault("/".join(here[:depth]), {}).setdefault(here[depth], set())
        for _, (file, _, _) in _imports(path):
            there = file.split("/")
            depth = next(i for i, (a, b) in enumerate(zip([*here, ""], [*there, ""], strict=False)) if a != b)
            if depth:
                graphs["/".join(here[:depth])][here[depth]].add(there[depth])
    found = {}
    for folder, graph in graphs.items():
        groups = _groups(graph)
        baseline: dict[str, int] = {}
        for group in groups:  # what a group stands on comes before it
            below = {other for unit in group for other in graph[unit]} - set(group)
            baseline |= dict.fromkeys(group, 1 + max((baseline[other] for other in below), default=0))
        num_files = sum(unit.endswith(".py") and unit != "__init__.py" for unit in graph)
        found[folder] = Room(num_files, max(baseline.values()), [group for group in groups if len(group) > 1])
    return found


def short_files(fewest: int = 40) -> dict[str, int]:
    """Files with fewer lines than that, packages' docstrings aside."""
    return {
        path: source(path).num_lines
        for path in files()
        if source(path).num_lines < fewest and not path.endswith("__init__.py")
    }


def table() -> str:
    """What is counted, as Markdown."""
    rows = ["| question | files | lines | at most | the longest |", "|---|---|---|---|---|"]
    for question in QUESTIONS:
        num_files, num_lines, lines = count(question)
        longest = sorted(lines, key=lines.__getitem__, reverse=True)[:NAMED]
        where = ", ".join(f"`{path}` {lines[path]}" for path in longest)
        most = f"{question.most_files} / {question.most_lines}"
        rows.append(f"| {question.asks} | {num_files} | {num_lines} | {most} | {where} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """The page with the table of today."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    print(table())
    total = sum(source(path).num_lines for path in files())
    print(f"{len(files())} files, {total:,} lines, {len(cycles())} import cycles")
    if "--write" in sys.argv:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
