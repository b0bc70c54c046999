"""Two pages that are made of the code: every key of a run's configuration, and what `from megadit import ...` finds."""

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

import megadit
from megadit.models.shared.cli.setting import described, settings_of
from megadit.train.config.schema import RunConfig


def keys_page() -> str:
    """Every key with its default and its description in `train/config/`."""
    about = """# Configuration

Every key of a run, for YAML files (`--config-file`) and for `section.key=value` on the command line. Where there is no
default the recipe decides; `megadit train --recipe NAME --print-config` shows all values of a run. A key that does not
exist is refused with the nearest one that does. Rules between keys are in `train/config/rules.py`.
"""
    tables = [_table(RunConfig, "")]
    return about + "\n".join(text for table in tables for text in table)


def _table(of: type, prefix: str) -> Iterator[str]:
    """Tables of a dataclass and, below, of those that its fields hold."""
    description, inner = documentation(of), []
    rows = []
    for each in dataclasses.fields(of):
        key, hint = prefix + each.name, get_type_hints(of)[each.name]
        section = next((part for part in (hint, *get_args(hint)) if dataclasses.is_dataclass(part)), None)
        if section is not None:
            inner.append((section, f"{key}.", description.get(each.name, "")))
            continue
        words = [
            str(word) for part in (hint, *get_args(hint)) if get_origin(part) is Literal for word in get_args(part)
        ]
        text = description.get(each.name, "") + (
            f" One of {', '.join(f'`{word}`' for word in words)}." if words else ""
        )
        rows.append(f"| `{key}` | {_default(each)} | {_in_a_cell(text)} |")
    if rows:
        yield f"\n## {prefix.rstrip('.') or 'The run'}\n"
        yield _about(of)
        yield "\n| key | default | |\n|---|---|---|"
        yield from rows
    for section, name, _ in inner:
        yield from _table(section, name)


def documentation(of: type) -> dict[str, str]:
    """Field of a dataclass -> its help and the text below it."""
    description = {name: described(about) for name, about in settings_of(of).items() if about.help}
    for field, text in chain.from_iterable(pairwise(_body(one)) for one in of.__mro__[:-1]):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            description[field.target.id] = ". ".join(
                filter(None, [description.get(field.target.id), inspect.cleandoc(text.value.value)])
            )
    return description


def _body(of: type) -> list[ast.stmt]:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(of))).body[0].body
    except (OSError, TypeError):  # made of another dataclass
        return []


def _about(of: type) -> str:
    text = inspect.getdoc(of) or ""
    return "" if text.startswith(f"{of.__name__}(") else text  # dataclasses write their signature where nothing stands


def _default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING:
        return ""
    return (
        f"`{field.default}`" if field.default and isinstance(field.default, str) else f"`{json.dumps(field.default)}`"
    )


def _in_a_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def api_page() -> str:
    """The names of `from megadit import ...`, as their docstrings describe them."""
    example = textwrap.dedent(inspect.getdoc(megadit).split("\n\n", 1)[1].rsplit("\n\n", 1)[0])
    parts = [f"# Python\n\n```python\n{example}\n```"]
    for name in (each for each in megadit.__all__ if not each.startswith("_")):
        thing = getattr(megadit, name)
        parts += [f"\n## {name}\n", f"`from megadit import {name}`, of `{thing.__module__}`.\n", _about(thing)]
        parts += _fields(thing) if dataclasses.is_dataclass(thing) else []
        for method in _methods(thing):
            parts += _described_method(name, *method)
    return "\n".join(parts)


def _fields(of: type) -> list[str]:
    description = documentation(of)
    rows = [
        f"| `{each.name}` | {_default(each)} | {_in_a_cell(description.get(each.name, ''))} |"
        for each in dataclasses.fields(of)
    ]
    return ["\n| field | default | |\n|---|---|---|", *rows]


def _methods(of: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(of).items():
        function = getattr(member, "__func__", member)
        if inspect.isfunction(function) and inspect.getdoc(function) and (name == "__call__" or name[0] != "_"):
            yield name, function


def _described_method(owner: str, name: str, function: Any) -> list[str]:
    arguments = []
    for each in list(inspect.signature(function).parameters.values())[1:]:
        arguments += ["*"] if each.kind is each.KEYWORD_ONLY and "*" not in arguments else []
        arguments.append(str(each))
    call = "pipeline(" if name == "__call__" else f"{owner}.{name}("
    lines = "".join(f"    {argument},\n" for argument in arguments)
    title = "calling it" if name == "__call__" else name
    return [f"\n### {owner}: {title}\n", f"```python\n{call}\n{lines})\n```\n", inspect.getdoc(function)]
