"""How far a reader of the code has to go: files and lines behind each question, cycles, and very short files.

    python docs/count.py            # prints the table
    python docs/count.py --write    # also writes it into docs/architecture.md

A question starts at some functions or classes. Whatever of this package their code names is followed, definition by
definition, until nothing new comes; a file counts with all of its lines once anything of it is reached. `beyond` are
files that the answer uses but a reader of this question need not open: what stands in them says its name.
"""

import ast
import sys
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
    beyond: tuple[str, ...] = ()
    """Files, or folders with a / at the end."""
    by_definition: bool = False
    """Count the lines of the definitions reached, where a file holds many siblings (samplers), not whole files."""
    most_files: int
    most_lines: int


VOCABULARY = (
    "models/config.py",
    "models/config_rules.py",
    "models/network_config.py",
    "models/families.py",
    "models/given_forms.py",
    "models/expert_config.py",
    "models/shared/",
)
"""Fields and errors, which every question meets."""

NETWORK = (
    *(
        "models/dit.py",
        "models/networks.py",
        "models/blocks.py",
        "models/attention.py",
        "models/experts.py",
        "models/axial.py",
    ),
    *("models/layout.py", "models/dense_layout.py", "models/segments.py", "models/ops/"),
    *("models/adapters.py", "models/low_rank.py"),
)
NO_TENSOR_SPLIT = tuple(
    f"models/megatron/{name}.py"
    for name in (
        *("groups", "sequence_parallel", "context_parallel", "expert_parallel", "adapter_parallel"),
        *("recomputed_blocks", "graphed_blocks", "te_linears", "int8_linears", "fp8_linears"),
    )
)
"""Who moves tokens and when blocks are computed; other linears in the same places."""

POSITIONS = tuple(f"models/{name}.py" for name in ("layout", "dense_layout", "segments", "axial", "embeddings"))
"""Who is where: a block hands it on to its operations."""
OTHER_OPS = tuple(
    f"models/ops/{name}.py"
    for name in ("batch_attention", "gated_residual", "ledger", "linear", "modulated_norm", "qk_norm_rope")
)
"""Operations that are called by names that say what they compute; each has its own page."""

QUESTIONS = (
    Question(
        asks="What is the loss?",
        starts=("train/loss.py:edm_loss",),
        beyond=(
            *VOCABULARY,
            "models/ddpm.py",
            "models/dit.py",
            "models/layout.py",
            "models/noise.py",
            "train/data/",
            "train/config/",
        ),
        most_files=2,
        most_lines=250,
    ),
    Question(
        asks="How does Heun's solver step?",
        starts=("infer/samplers.py:heun",),
        beyond=(*VOCABULARY, "models/noise.py", "models/settings.py"),
        by_definition=True,
        most_files=1,
        most_lines=60,
    ),
    Question(
        asks="What does a block compute, down to its attention?",
        starts=("models/blocks.py:DiTBlock",),
        beyond=(*VOCABULARY, *POSITIONS, *OTHER_OPS, "models/experts.py"),
        most_files=5,
        most_lines=950,
    ),
    Question(
        asks="Which tensor is split how over ranks?",
        starts=("models/megatron/parallelize.py:parallelize",),
        beyond=(*VOCABULARY, *NETWORK, *NO_TENSOR_SPLIT),
        most_files=3,
        most_lines=400,
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
    "models/given_forms.py": "a table, free of torch",
    "infer/user_program.py": "shared by the hooks of a filter and of a judge",
    "infer/evaluate/compare.py": "a command of its own",
    "infer/inference_dit_model.py": "a name that users of NeMo type",
    "models/adapter_config.py": "settings, free of torch",
    "models/megatron/extensions.py": "asked before a run starts, without Megatron",
    "models/tokenizers/sizes.py": "shared by tokenizers, free of torch",
    "models/shared/ports.py": "shared by ranks and servers",
    "models/shared/tar_files.py": "shared by training, preparation and evaluation, free of Energon",
    "serve/gateway/process.py": "what starts the gateway, without the gateway",
    "serve/examples/with_megadit.py": "a program to copy",
    "serve/examples/with_openai.py": "a program to copy",
    "train/cpu_memory.py": "a switch of the allocator",
    "train/data/ingest/motion.py": "a measure, free of torch",
    "train/digits/samples.py": "a data set, written like that of shapes",
    "train/shapes/samples.py": "a data set, written like that of digits",
    "train/data/ingest/flow.py": "imports torch, which a scan otherwise does without",
    "serve/forms.py": "shared by the gateway and the page",
    "serve/model_files.py": "shared by repositories of videos and of features",
    "train/pretrain_dit_model.py": "a name that users of DFM type",
    "train/recipes/experts.py": "the recipes of a family",
    "train/recipes/registry.py": "recipes register without importing one another",
    "train/sampling_defaults.py": "shared by validation and bundles",
    "train/shared_base.py": "shared by networks in memory and sharded ones",
}
"""Why a file has fewer than 40 lines."""


def files() -> list[str]:
    """All Python files of the five folders, relative to the repository."""
    return sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@cache
def source(path: str) -> Source:
    text = (ROOT / path).read_text(encoding="utf-8")
    tree = ast.parse(text)
    definitions: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        definitions[name.id] = node
    found = {}
    for name, (file, there, _) in _imports(tree):
        found[name] = (file, there)
    return Source(path, len(text.splitlines()), definitions, found)


def _imports(tree: ast.AST) -> Iterator[tuple[str, tuple[str, str, bool]]]:
    """(name here, (file of ours, name there, whether it is imported when the file is)) of each import of ours."""
    at_once = set(_at_import(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megadit"):
            for alias in node.names:
                here, is_at_once = alias.asname or alias.name, node in at_once
                if module := _file(f"{node.module}.{alias.name}"):
                    yield here, (module, "", is_at_once)
                elif module := _file(node.module):
                    yield here, (module, alias.name, is_at_once)


def _at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes outside of functions."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _at_import(node)


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
        if (path, name) in seen or path.startswith(question.beyond):
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


def count(question: Question) -> tuple[int, int, list[str]]:
    """(files, lines, the files) behind a question."""
    found = closure(question)
    paths = sorted({path for path, _ in found})
    if question.by_definition:
        nodes = {(path, node.lineno): node for path, name in found for node in [source(path).definitions[name]]}
        return len(paths), sum(node.end_lineno - node.lineno + 1 for node in nodes.values()), paths
    return len(paths), sum(source(path).num_lines for path in paths), paths


def cycles() -> list[list[str]]:
    """Groups of files that import one another when they are imported (Tarjan's strongly connected components)."""
    graph = {
        path: {file for _, (file, _, at_once) in _imports(ast.parse((ROOT / path).read_text())) if at_once}
        for path in files()
    }
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
            if len(members) > 1:
                found.append(sorted(members))

    for path in graph:
        if path not in index:
            visit(path)
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
    rows = ["| question | files | lines | at most | where |", "|---|---|---|---|---|"]
    for question in QUESTIONS:
        num_files, num_lines, paths = count(question)
        where = ", ".join(f"`{path}`" for path in paths)
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
