"""Options of a command, from the settings of a dataclass (`setting.py`), and their parser.

Each command is a function of its options, a frozen dataclass:

    @command(TrimOptions, prog="megadit trim", description="Trims a clip.")
    def main(options: TrimOptions) -> None: ...

A command with many options also has a table of groups, the most used first, in which every option occurs once.
"""

import argparse
import re
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from megadit.models.shared.cli.command import entry_point
from megadit.models.shared.cli.setting import Setting, check_value, described, groups_of, settings_of
from megadit.models.shared.errors import UserError, did_you_mean, nearest

Options = TypeVar("Options")


Groups = Mapping[str, Sequence[str]]
"""Title of a group of options in the help -> the names of its settings."""
SIZE = Setting(name="size", help="height and width in pixels: 64x96", type=int, count=2, nargs=2)
"""The option of every command that has a height and a width, in place of both."""
SIDES = re.compile(r"\s*(\d+)\s*[xX×]\s*(\d+)\s*")
"""Height and width."""
MOST_IN_ONE_LIST = 16
"""Options of a command without groups."""


def with_rest(groups: Groups, title: str, of: type) -> Groups:
    """The groups, with settings of the dataclass `of` that are in none of them appended to `title`'s."""
    listed = {name for names in groups.values() for name in names}
    rest = [name for name, about in settings_of(of).items() if name not in listed and not about.positional]
    return {**groups, title: (*groups[title], *rest)}


def command(
    of: type[Options], *, is_run: bool = False, **parser: Any
) -> Callable[[Callable[[Options], int | None]], Callable[..., int]]:
    """Turns a function of its options into a command, which takes arguments (default: the process's) and returns an
    exit code; `parser` as in `read_options`, `is_run` and errors as in `run_command`."""

    def decorate(function: Callable[[Options], int | None]) -> Callable[..., int]:
        @wraps(function)
        def run(arguments: list[str]) -> int | None:
            return function(read_options(of, arguments, **parser))

        return entry_point(run, is_run=is_run)

    return decorate


def read_options(
    of: type[Options], argv: Sequence[str], *, groups: Groups = MappingProxyType({}), **parser: Any
) -> Options:
    """The options in `argv` as the dataclass `of`.

    Args:
            groups: how the help groups options; positional arguments come before.
            parser: arguments of `CommandParser`, above all `prog`, `description` and `examples`.

    Raises:
        UserError: for an argument that is unknown (names the nearest option), missing, malformed or out of bounds.
        TypeError: if an option is in no group, or in two.
    """
    known = every_setting(of)
    listed = [name for names in groups.values() for name in names]
    if groups or sum(not about.positional for about in known.values()) > MOST_IN_ONE_LIST:
        wrong = [name for name, about in known.items() if listed.count(name) != (0 if about.positional else 1)]
        if wrong or len(listed) > len(known):
            raise TypeError(f"{of.__name__}: in the groups of its help, {wrong or 'an unknown option'} must occur once")
        parser = {"usage": _usage(parser["prog"], known.values())} | parser
    made = CommandParser(**parser)
    if groups:
        for title, names in {"": [name for name in known if name not in listed], **groups}.items():
            part = made.add_argument_group(title) if title else made
            for name in names:
                _add(part, known[name])
    else:
        options(made, of)
    has_sides = {"height", "width"} <= known.keys() and "size" not in known
    if has_sides:
        _add(
            next(part for part in made._action_groups if any(each.dest == "height" for each in part._group_actions)),
            SIZE,
        )
    values = vars(made.parse_args(argv))
    return made_of(of, _with_sides(values) if has_sides else values)


def _with_sides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `size` to height and width.

    Raises:
        UserError: for a size together with height or width.
    """
    if "size" not in values:
        return dict(values)
    if one := next((name for name in ("height", "width") if name in values), None):
        raise UserError(f"--size sets height and width; leave out --{one}")
    return {**values, **dict(zip(("height", "width"), values["size"], strict=True))}


def every_setting(of: type) -> dict[str, Setting]:
    """The settings of a dataclass and of its groups, by name."""
    known = dict(settings_of(of))
    for part in groups_of(of).values():
        inner = every_setting(part.of)
        known |= inner if part.only is None else {name: inner[name] for name in part.only}
    return known


def _usage(prog: str, known: Iterable[Setting]) -> str:
    """`megadit convert SOURCE [OUT] [options]`."""
    positional = [about for about in known if about.positional]
    shown = [about.metavar or about.name for about in positional]
    words = [name if about.required else f"[{name}]" for name, about in zip(shown, positional, strict=True)]
    return " ".join([prog, *words, "[options]"])


def options(parser: Any, of: type, *, only: Iterable[str] | None = None, skip: Collection[str] = ()) -> None:
    """Adds the settings of a dataclass, its own before inherited ones or in the order of `only`, and those of its
    groups."""
    known, groups = settings_of(of), groups_of(of)
    own_first = sorted((each.name for each in fields(of)), key=lambda name: name not in of.__annotations__)
    for name in only if only is not None else [name for name in own_first if name not in skip]:
        if name in known:
            _add(parser, known[name])
        elif name in groups:
            part = groups[name]
            options(parser.add_argument_group(part.title) if part.title else parser, part.of, only=part.only)


def set_options(of: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `of` that a parser found, checked, without those that were left out.

    Raises:
        UserError: as `check_value`.
    """
    known = settings_of(of)
    return {name: check_value(known[name], _shown(known[name]), values[name]) for name in known if name in values}


def made_of(of: type[Options], values: Mapping[str, Any]) -> Options:
    """Build the dataclass from what a parser found; settings that were left out have their defaults.

    Raises:
        UserError: as `check_value`.
    """
    groups = {name: made_of(part.of, values) for name, part in groups_of(of).items()}
    return of(**set_options(of, values), **groups)


def read_assignments(of: type, texts: Sequence[str]) -> dict[str, Any]:
    """Settings of a dataclass from texts such as `num_steps=20`; several values are separated by commas.

    Raises:
        UserError: for a text of another form, an unknown name, and a value of another type.
    """
    known, values = settings_of(of), {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise UserError(f"{text!r} must be NAME=VALUE, such as num_steps=20")
        if name not in known:
            raise UserError(f"there is no setting {name!r}{did_you_mean(name, known)}")
        read = _reader(known[name])
        try:
            values[name] = read(value) if known[name].count is None else tuple(map(read, value.split(",")))
        except ValueError:
            raise UserError(f"{text}: {value!r} is no {read.__name__}") from None
    return values


def _add(parser: Any, about: Setting) -> None:
    """Adds an option. Options that are not given are not in the result, so that the dataclass's defaults apply."""
    shown: dict[str, Any] = {"help": _help(about), "metavar": _metavar(about)}
    if about.type is bool:
        shown = {"help": shown["help"], "action": "store_false" if about.default is True else "store_true"}
    elif about.count is not None and about.repeated:
        shown |= {"action": "extend", "nargs": about.nargs} if about.nargs else {"action": "append"}
    elif about.count is not None:
        shown["nargs"] = about.nargs or about.count or ("*" if about.positional and not about.required else "+")
    elif about.nargs or (about.positional and not about.required):
        shown["nargs"] = about.nargs or "?"
    if about.type is not bool:
        shown["type"] = _reader(about)
    if about.positional:
        action = parser.add_argument(about.name, default=SUPPRESS, **shown)
    else:
        action = parser.add_argument(
            *_names(about), dest=about.name, default=SUPPRESS, required=about.required, **shown
        )
    action.known = tuple(about.choices or ())  # argparse's own `choices` has other messages


def _names(about: Setting) -> tuple[str, ...]:
    return about.names or (f"--no_{about.name}" if about.default is True else f"--{about.name}",)


def _shown(about: Setting) -> str:
    """Name of an option in error messages."""
    if about.positional:
        return about.metavar or about.name
    return next((name for name in _names(about) if name.startswith("--")), about.name)


def _help(about: Setting) -> str | None:
    return described(about).replace("%", "%%") or None


def _metavar(about: Setting) -> str | tuple[str, ...] | None:
    if about.name == SIZE.name and about.count == SIZE.count:
        return "HxW", ""  # parsers also take both numbers apart
    if about.metavar is None and isinstance(about.choices, tuple | list):
        return f"{{{','.join(about.choices)}}}"
    if about.metavar is None and not about.positional:
        return {int: "INT", float: "NUMBER", Path: "PATH"}.get(about.type)
    return about.metavar


def _reader(about: Setting) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return text if text is SUPPRESS or text in about.words else about.type(text)

    read.__name__ = " or ".join((about.type.__name__, *about.words))  # argparse: invalid float or auto value
    return read


# --- the parser ----------------------------------------------------------------------------------------------------


class _Formatter(argparse.HelpFormatter):
    """Fills paragraphs, but leaves those with indented lines (tables, examples) unchanged."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip().split("\n\n")
        filled = [
            part if "\n " in f"\n{part}" else super(_Formatter, self)._fill_text(part, width, indent) for part in parts
        ]
        return "\n\n".join(filled)


class CommandParser(argparse.ArgumentParser):
    """An argparse parser whose errors are `UserError`s, which `run_command` prints in one line.

    Options are never abbreviated; `--num-steps` is read as `--num_steps` if only that exists. Help ends with
    `examples`, command lines.
    """

    def __init__(self, *, examples: Sequence[str] = (), epilog: str = "", **settings: Any) -> None:
        shown = [epilog, "\n".join(["examples:", *(f"  {line}" for line in examples)]) if examples else ""]
        epilog = "\n\n".join(filter(None, shown))
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, epilog=epilog or None, **settings)
        self.examples = tuple(examples)

    def parse_args(self, args: Sequence[str], namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        """The options in `args`.

        Raises:
            UserError: for an argument that is unknown (names the nearest option), missing or malformed.
        """
        if _is_help_asked:
            raise _FoundError(self)
        # positional arguments may stand anywhere among the options; which argparse does not support with subcommands
        parse = self.parse_known_args if self._subparsers else self.parse_known_intermixed_args
        options, unknown = parse(self._sides_apart([self._spelling(argument) for argument in args]), namespace)
        if unknown:
            asked, known = unknown[0].partition("=")[0].lstrip("-"), self._option_string_actions
            # a wrong suggestion is worse than none
            near = nearest(asked, [name.lstrip("-") for name in known], likeness=0.75)
            hint = f"; did you mean {next(name for name in known if name.lstrip('-') == near)!r}?" if near else ""
            self.error(f"unknown argument {unknown[0]!r}{hint}")
        return options

    def _sides_apart(self, args: list[str]) -> list[str]:
        """Splits `--size 64x96` into `--size 64 96`, for options with two integers."""
        apart: list[str] = []
        for argument in args:
            name, _, value = argument.rpartition("=")
            text = value if name else argument
            action = self._option_string_actions.get(name or (apart[-1] if apart else ""))
            has_two_values = action is not None and action.nargs == 2 and getattr(action.type, "__name__", "") == "int"
            if has_two_values and (sides := SIDES.fullmatch(text)):
                apart += [*([name] if name else []), *sides.groups()]
            else:
                apart.append(argument)
        return apart

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}{'' if message.endswith('?') else ';'} see `{self.prog} --help`")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # here, so that `run_command` sees a closed pipe
        super().exit(status, message)

    def _spelling(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        underscored = name[:2] + name[2:].replace("-", "_")
        return underscored + equals + value if underscored in self._option_string_actions else argument


class _FoundError(Exception):
    """Carries the parser that `parser_of` looks for."""


_is_help_asked: list[bool] = []


def parser_of(command: Callable[[], Any]) -> CommandParser | None:
    """The parser of a command, without running the command; None if it has none."""
    _is_help_asked.append(True)
    try:
        command()
    except _FoundError as found:
        return found.args[0]
    finally:
        _is_help_asked.pop()
    return None
