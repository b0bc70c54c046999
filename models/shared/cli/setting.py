"""Settings: dataclass fields with help and bounds.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class TrimOptions:
        clip: Path = setting(help="the clip to trim", positional=True)
        seconds: float = setting(2.0, "length of what is kept (default: {default})", above=0)

The annotation determines the type. Options of commands are made from settings (`options.py`); the same settings check
JSON and YAML values.
"""

import math
import os
import re
import shlex
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megadit.models.shared.errors import UserError, choose_one, did_you_mean

LONGEST_NAME = 230
"""Maximum bytes of a file name: the 255 of file systems, minus the suffix of temporary names."""
_FOR_SHELL = re.compile(r"(~[\w.-]*|\$[A-Za-z_]\w*|\$\{\w+\})/")
"""Beginning of a path that a shell would replace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Description of a settings field, completed by `settings_of` from its name, default and annotation."""

    help: str = ""
    low: float | None = None
    """Minimum value."""
    high: float | None = None
    """Maximum value."""
    above: float | None = None
    """Exclusive lower bound."""
    below: float | None = None
    """Exclusive upper bound."""
    choices: Collection[str] | None = None
    served: bool = False
    """Whether a request to a service may set it."""

    metavar: str | tuple[str, ...] | None = None
    names: tuple[str, ...] = ()
    """Names of the option; (): `--` and the field's name, or `--no_` and the name for a switch that is on by
    default."""
    positional: bool = False
    nargs: int | str | None = None
    """`nargs` of argparse; None: derived from the annotation."""
    repeated: bool = False
    """Whether the option may be given several times, each time adding a value."""

    name: str = ""
    default: Any = None
    required: bool = False
    """Whether there is no default."""
    type: Any = str
    """Type of the value, or of each in a sequence: bool, int, float, str or Path."""
    optional: bool = False
    """Whether None is a value."""
    words: tuple[str, ...] = ()
    """Words allowed in place of a number, such as auto."""
    count: int | None = None
    """None: one value; 0: a sequence of any length; n: a sequence of n values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Description of a field that is itself a dataclass of settings."""

    of: type
    title: str
    only: Collection[str] | None


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Collection[str] | None = None,
    served: bool = False,
    metavar: str | None = None,
    names: tuple[str, ...] = (),
    positional: bool = False,
    nargs: int | str | None = None,
    repeated: bool = False,
) -> Any:
    """A dataclass field with a `Setting`. `{default}` in `help` is replaced by the default."""
    about = Setting(
        help=help,
        low=low,
        high=high,
        above=above,
        below=below,
        choices=choices,
        served=served,
        metavar=metavar,
        names=names,
        positional=positional,
        nargs=nargs,
        repeated=repeated,
    )
    return field(default=default, metadata={"setting": about})


def port_setting(default: int | None, help: str) -> Any:
    """A `setting` that is the number of a port."""
    return setting(default, help, low=0, high=65535, metavar="PORT")


def group(of: type, title: str = "", *, only: Collection[str] | None = None) -> Any:
    """A field that is a dataclass of settings; its settings, or `only` some, are options, maybe under a title."""
    return field(default_factory=of, metadata={"group": Group(of=of, title=title, only=only)})


def partial_dataclass(name: str, of: type, *, only: Collection[str] | None = None) -> type:
    """Make a dataclass of the same settings, or `only` some of them, all with default None."""
    return _same_settings(name, of, {each.name: None for each in fields(of) if only is None or each.name in only})


def with_defaults(name: str, of: type, *, module: str, **defaults: Any) -> type:
    """A dataclass of the same settings with other defaults; settings without a default get None.

    `module` is the module that has it under this name, for pickle.
    """
    own = {each.name: None if each.default is MISSING else each.default for each in fields(of)}
    made = _same_settings(name, of, own | defaults)
    made.__module__ = module
    return made


def _same_settings(name: str, of: type, defaults: Mapping[str, Any]) -> type:
    """A dataclass of the settings in `defaults`; help still shows the defaults of `of`."""
    hints, known = get_type_hints(of), settings_of(of)
    made = []
    for each, default in defaults.items():
        metadata = {"setting": replace(known[each], help=described(known[each]))}
        hint = hints[each] | None if default is None else hints[each]
        made.append((each, hint, field(default=default, metadata=metadata)))
    return make_dataclass(name, made, frozen=True, kw_only=True, slots=True)


@cache
def settings_of(of: type) -> dict[str, Setting]:
    """The settings of a dataclass by name, without those of its groups."""
    hints = get_type_hints(of)
    return {
        each.name: _resolve(each.metadata["setting"], each.name, each.default, hints[each.name])
        for each in fields(of)
        if "setting" in each.metadata
    }


def under_own_names(values: Mapping[str, Any], known: Mapping[str, Setting], *, where: str = "") -> dict[str, Any]:
    """The values by the settings' own names, where some have aliases; `where` begins every error message.

    Raises:
        UserError: for a setting under two of its names.
    """
    others, found, own = other_names(known), {}, {}
    for name, value in values.items():
        target = others.get(name, name)
        if target in own:
            raise UserError(f"{where}{found[target]} and {name} are names of one setting; give one of them")
        found[target], own[target] = name, value
    return own


def other_names(known: Mapping[str, Setting]) -> dict[str, str]:
    """Alias of a setting, such as num_video_frames -> its own name."""
    return {
        other.removeprefix("--"): name for name, about in known.items() for other in about.names if other != f"--{name}"
    }


def described(about: Setting) -> str:
    """Its help, with the default inserted as it would be typed."""
    default = shlex.join(map(str, about.default)) if isinstance(about.default, tuple) else str(about.default)
    return about.help.replace("{default}", default)


def groups_of(of: type) -> dict[str, Group]:
    """The fields of a dataclass that are dataclasses of settings."""
    return {each.name: each.metadata["group"] for each in fields(of) if "group" in each.metadata}


# ------------------------------------------------------------------------------------------------ annotations


def _resolve(about: Setting, name: str, default: Any, hint: Any) -> Setting:
    about = replace(about, name=name, default=None if default is MISSING else default, required=default is MISSING)
    parts = [hint]
    if get_origin(hint) in (Union, types.UnionType):
        parts = [part for part in get_args(hint) if part is not types.NoneType]
        about = replace(about, optional=len(parts) < len(get_args(hint)))
    words = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
    parts = [part for part in parts if get_origin(part) is not Literal]
    if not parts:
        return replace(about, type=str, choices=about.choices or words)
    (value,) = parts
    origin, arguments = get_origin(value), get_args(value)
    if origin in (tuple, list) or (origin and issubclass(origin, Sequence)):
        count = len(arguments) if origin is tuple and Ellipsis not in arguments else 0
        return _resolve_items(replace(about, count=count), arguments[0])
    if value not in (bool, int, float, str, Path):
        raise TypeError(f"no option can be made of {name}: {hint}")
    return replace(about, type=value, words=words)


def _resolve_items(about: Setting, hint: Any) -> Setting:
    item = _resolve(replace(about, optional=False), about.name, about.default, hint)
    return replace(item, optional=about.optional, required=about.required)


# ------------------------------------------------------------------------------------------------ values


def plain(value: Any) -> Any:
    """A Python number or list in place of one of numpy or torch; other values are unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def check_value(about: Setting, name: str, value: Any) -> Any:
    """The value in its annotated type: a tuple for a list, a path for its text.

    Args:
        name: as the user wrote it, such as --eta, eta or validation.sampling.eta.

    Raises:
        UserError: for a value of another type, out of bounds, or not among the choices.
    """
    value = plain(value)
    if value is None and about.optional:
        return None
    if about.count is None:
        return _check_one(about, name, value)
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not is_list or (about.count and len(value) != about.count):
        raise UserError(f"{name}={value!r} must be {_expected(about)}")
    return tuple(_check_one(about, name, item) for item in value)


def _check_one(about: Setting, name: str, value: Any) -> Any:
    value = plain(value)
    if value in about.words and isinstance(value, str):
        return value
    if about.type is Path and isinstance(value, str):
        value = Path(value)
    kinds = (int, float) if about.type is float else about.type
    if not isinstance(value, kinds) or (isinstance(value, bool) and about.type is not bool):
        raise UserError(f"{name}={value!r} must be {_expected(about)}")
    if isinstance(value, str | Path):
        check_text(name, value)
    if about.choices is not None:
        choose_one(value, about.choices, f"{name}={value!r} is unknown")
    if not _is_within(about, value):
        shown = f"{value:g}" if isinstance(value, float) else value
        bounds = _bounds(about) if _is_finite(value) else "must be a finite number"
        raise UserError(f"{name}={shown} {bounds}")
    return value


def _expected(about: Setting) -> str:
    one = {bool: "true or false", int: "a whole number", float: "a number"}.get(about.type, "text")
    if about.count is not None:
        several = {int: "whole numbers", float: "numbers"}.get(about.type, "texts")
        return f"a list of {about.count} {several}" if about.count else f"a list of {several}"
    return " or ".join((one, *about.words))


def _is_within(about: Setting, value: Any) -> bool:
    if about.low is about.high is about.above is about.below is None:
        return True
    least = -math.inf if about.low is None else about.low
    exceeded = -math.inf if about.above is None else about.above
    most = math.inf if about.high is None else about.high
    exceeding = math.inf if about.below is None else about.below
    return least <= value <= most and exceeded < value < exceeding and _is_finite(value)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of float
        return False


def _bounds(about: Setting) -> str:
    low, high = about.low, about.high
    if low is not None and high is not None:
        return f"must lie between {low:g} and {high:g}"
    if low == 0 and about.below is None:
        return "must not be negative"
    rules = {"at least": low, "greater than": about.above, "at most": high, "below": about.below}
    return "must be " + " and ".join(f"{rule} {bound:g}" for rule, bound in rules.items() if bound is not None)


def check_text(name: str, value: str | Path) -> None:
    """Raises UserError for text that is not UTF-8, for a path that file systems do not support, and for one that begins
    as shells write folders: `--out=~/clips` comes as it stands."""
    if any("\ud800" <= letter <= "\udfff" for letter in str(value)):  # undecodable bytes
        raise UserError(f"{name}={str(value)!a} is not valid text (UTF-8)")
    if for_shell := _FOR_SHELL.match(str(value)):
        raise UserError(f"{name}={value}: no shell has replaced {for_shell[1]}; write the folder that it stands for")
    if isinstance(value, Path):
        if "\0" in str(value):
            raise UserError(f"{name}={str(value)!a}: no path holds a null character")
        for part in value.parts:
            if len(os.fsencode(part)) > LONGEST_NAME:  # including a temporary suffix
                raise UserError(f"{name}: the name {part[:40]}... is too long")


def check_settings(of: Any, where: str = "") -> None:
    """Checks the settings of a dataclass instance, and converts its numbers with `plain`; `where` is a prefix of their
    names, such as "optimizer.".

    Raises:
        UserError: as `check_value`.
    """
    for name, about in settings_of(type(of)).items():
        value = getattr(of, name)
        checked = check_value(about, f"{where}{name}", value)
        if plain(value) is not value:
            object.__setattr__(of, name, checked)


def check_json(values: Mapping[str, Any], of: type, *, where: str = "", only: Iterable[str] | None = None) -> dict:
    """The values of settings, including those of groups, in a JSON object or YAML mapping.

    Args:
        where: begins every error message, such as "prompts.jsonl, line 3: ".
        only: the settings that may be given; None is all.

    Raises:
        UserError: for an unknown key (names the nearest known one), and for a value as in `check_value`.
    """
    known = settings_of(of)
    for part in groups_of(of).values():
        known = known | settings_of(part.of)
    known = known if only is None else {name: known[name] for name in only}
    for name in values:
        if name not in known:
            raise UserError(f"{where}{name!r} is unknown{did_you_mean(name, known)}")
    return {name: check_value(known[name], f"{where}{name}", value) for name, value in values.items()}
