"""Public functions that take or give tensors say their shapes: by the suffix of a name, or in words."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("models", "infer", "train")
SUFFIX = re.compile(r"_\d*[A-Z][A-Za-z0-9]*$")
SHAPE = re.compile(
    r"_[A-Z][A-Za-z0-9]*\b"  # x_SBD
    r"|\[[^\]]*\]"  # [S, 1, D], [batch, ...]
    r"|\b(?:B?C?T?HW|BC?THW|B?LE|[1GSBTCLNEDK]HW)\b"  # BCTHW
    r"|\((?:[A-Z0-9][\w+*/ ]*|\.\.\.)(?:, ?[\w+*/. ]+)+,?\)"  # (C, T, H, W)
    r"|\b(?:[oO]ne number|any shape|any size|same shapes?|shapes?|shaped like|flat|scalars?|whole tensors?)\b"
)
NAMED = ("Mapping", "dict", "Callable", "type", "TensorSource")
"""Types that hold tensors of every shape, or none."""


def is_tensor(annotation: ast.expr | None) -> bool:
    """Whether a value of this type is a tensor, or a sequence of tensors."""
    if annotation is None:
        return False
    if isinstance(annotation, ast.BinOp):  # a union
        sides = (annotation.left, annotation.right)
        return any(map(is_tensor, sides)) and not any(getattr(side, "id", "") in NAMED for side in sides)
    if isinstance(annotation, ast.Subscript):
        return getattr(annotation.value, "id", "") not in NAMED and is_tensor(annotation.slice)
    if isinstance(annotation, ast.Tuple):
        return any(map(is_tensor, annotation.elts))
    return isinstance(annotation, ast.Name) and annotation.id == "Tensor"


def public_functions(
    body: list[ast.stmt], owner: str = "", about: str = ""
) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """(name, function, what is said of its class)."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body, f"{owner}{node.name}.", ast.get_docstring(node) or "")
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield owner + node.name, node, about


def unsaid(function: ast.FunctionDef, about_class: str, about_module: str) -> list[str]:
    """The tensors of a function of which no shape is said; `->` is what it gives."""
    about = f"{ast.get_docstring(function) or ''}\n{about_class}"
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]

    def is_said(name: str) -> bool:
        if SUFFIX.search(name) or re.search(r"\] (?:\w+ )?->", about):
            return True
        mentions = re.finditer(rf"\b{name}\b.*(?:\n.*)?", f"{about}\n{about_module}")
        return any(SHAPE.search(mention.group(), len(name)) for mention in mentions)

    tensors = [each.arg for each in arguments if is_tensor(each.annotation)]
    is_sole_and_said = len(tensors) == 1 and SHAPE.search(ast.get_docstring(function) or "")
    names = [] if is_sole_and_said else [name for name in tensors if not is_said(name)]
    gives_one = is_tensor(function.returns)
    is_sampler = any(getattr(each, "id", "") == "sampler" for each in function.decorator_list)  # the module says
    return names + ["->"] * (gives_one and not (SHAPE.search(about) or SUFFIX.search(function.name) or is_sampler))


def functions_with_tensors(text: str) -> dict[str, list[str]]:
    """Name of each public function that takes or gives tensors -> those of which no shape is said."""
    tree = ast.parse(text)
    found = {}
    for name, function, about in public_functions(tree.body):
        types = [each.annotation for each in function.args.args + function.args.kwonlyargs] + [function.returns]
        if any(map(is_tensor, types)):
            found[name] = unsaid(function, about, ast.get_docstring(tree) or "")
    return found


def test_every_public_function_says_the_shapes_of_its_tensors():
    found = {
        f"{path.relative_to(ROOT)}: {name}": missing
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        for name, missing in functions_with_tensors(path.read_text(encoding="utf-8")).items()
    }
    assert len(found) > 150
    assert {name: missing for name, missing in found.items() if missing} == {}


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("def f(x: Tensor) -> int:\n    'Of x.'", ["x"]),
        ("def f(x_SBD: Tensor) -> Tensor:\n    'Its norm.'", ["->"]),
        ("def f(x: Tensor | None = None) -> tuple[Tensor, ...]:\n    pass", ["x", "->"]),
        ("def f(x: Tensor) -> Tensor:\n    '[S, B, D] -> [S, D].'", []),
        ("def f(x_SBD: Tensor) -> Tensor:\n    'Its norm, [S, B, D].'", []),
        ("class A:\n    'x is BCTHW.'\n    def f(self, x: Tensor) -> None:\n        pass", []),
    ],
)
def test_an_unsaid_shape_is_seen(text, missing):
    assert list(functions_with_tensors(text).values()) == [missing]
