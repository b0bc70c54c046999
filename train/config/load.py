"""Configuration of a run from recipe, data set, YAML or TOML file and `a.b=c` overrides; later ones take precedence."""

import dataclasses
import types
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from megadit.models.configs.config import DiTConfig
from megadit.models.shared.cli.setting import check_text
from megadit.models.shared.errors import UserError, choose_one, nearest
from megadit.models.shared.files import read_json, read_yaml
from megadit.train.config.changes import first_line, flatten, parse_overrides, read_config_file, read_optional
from megadit.train.config.compat import expand_braces, translate
from megadit.train.config.facts import OF_DATASET, agree
from megadit.train.config.schema import RunConfig
from megadit.train.recipes import load_recipe

Config = TypeVar("Config")

OTHER_WORDS = {
    **dict.fromkeys(("learning_rate", "max_lr", "base_lr"), "optimizer.lr"),
    **dict.fromkeys(("min_learning_rate", "lr_min"), "optimizer.min_lr"),
    **dict.fromkeys(("batch_size", "train_batch_size"), "data.global_batch_size"),
    "max_steps": "train.train_iters",
    "max_grad_norm": "optimizer.clip_grad",
}
"""Last part of a common but unknown key -> the key to suggest."""


def resolve_config(
    recipe: str | None = None, *, config_file: str | Path | None = None, overrides: list[str] | None = None
) -> RunConfig:
    """The configuration of a command line: recipe < data set < `config_file` < `overrides` (each `a.b=c`).

    Settings that a network must share with its data set (`facts.OF_DATASET`) are read from the data set unless set.
    The file may name its recipe itself under the key `recipe`, as the config.yaml of every run does. Keys may be those
    of NeMo and DFM (see `compat`).

    Raises:
        UserError: for an unknown recipe or key (naming the nearest known one), a value of the wrong type, a file that
            cannot be read, or values that contradict each other.
    """
    from_file = read_optional(config_file)
    named_by_file = from_file.pop("recipe", None)
    if recipe and named_by_file and recipe != named_by_file:
        raise UserError(f"--recipe {recipe} but {config_file} says recipe: {named_by_file}; drop one of them")
    if not (recipe or named_by_file):
        raise UserError("no recipe; give --recipe NAME, or a --config-file with a `recipe:` key")

    expanded = [part for override in overrides or [] for part in expand_braces(override)]
    if any(override.startswith("recipe=") for override in expanded):
        raise UserError("recipe=NAME would change the name of the run alone; choose one with --recipe NAME")
    return _changed(load_recipe(recipe or named_by_file), from_file, expanded)


def change(config: Config, *, config_file: str | Path | None = None, overrides: list[str] | None = None) -> Config:
    """`config` (any configuration dataclass) < `config_file` < `overrides`, under the same rules as a run. Raises
    UserError as `resolve_config`."""
    return _changed(config, read_optional(config_file), overrides or [])


def _changed(config: Config, from_file: DictConfig, overrides: list[str]) -> Config:
    updates = [from_file, parse_overrides(overrides)]
    if isinstance(config, RunConfig):
        named = [_in_our_names(OmegaConf.to_container(update)) for update in updates]
        updates = [OmegaConf.create(_with_one_length(values)) for values in named]
        asked = {key: value for update in updates for key, value in flatten(OmegaConf.to_container(update)).items()}
        for key, value in asked.items():
            if isinstance(value, str):
                check_text(key, value)
        network = _from_dataset(config, asked) | _from_base(config, asked)
        updates.insert(0, OmegaConf.create({"model": network} if network else {}))
    values = dataclasses.asdict(config)
    merged = OmegaConf.create(_concerned(values, updates))
    OmegaConf.set_struct(merged, True)
    for name in merged.keys() & _named_by_the_user(type(config)):
        OmegaConf.set_struct(merged[name], False)
    for update in updates:
        if update:
            merged = _merge(merged, update, type(config))
    return _build(type(config), values | _plain(merged), path="", root=type(config))


def _concerned(values: dict[str, Any], updates: list[DictConfig]) -> dict[str, Any]:
    """The sections that `updates` change, all if they refer to others: OmegaConf takes most of the time to make."""
    asked = [OmegaConf.to_container(update) for update in updates]
    refers = "${" in str(asked)
    return {name: value for name, value in values.items() if refers or any(name in update for update in asked)}


def _with_one_length(values: dict[str, Any]) -> dict[str, Any]:
    """`values` where `train.train_iters`, if set, replaces an earlier `train.max_epochs`. Raises UserError if both are
    set at once."""
    train = values.get("train")
    if not isinstance(train, dict) or train.get("train_iters") is None:
        return values
    if train.get("max_epochs") is not None:
        raise UserError("train.train_iters and train.max_epochs both say how long the run is; give one of them")
    return {**values, "train": {**train, "max_epochs": None}}


def named_recipe(config_file: str | Path) -> str | None:
    """Return the value of `recipe` in a YAML or TOML file. Raises UserError if it cannot be read."""
    return read_config_file(config_file).get("recipe")


def _from_base(config: RunConfig, asked: dict[str, Any]) -> dict[str, Any]:
    """Network settings of the bundle that is an adapter's base, whose shape the run's network must have."""
    path = asked.get("checkpoint.init_from", config.checkpoint.init_from)
    has_adapter = config.train.adapter is not None or any(key.startswith("train.adapter.") for key in asked)
    file = Path(str(path), "transformer", "config.json")
    if path is None or not has_adapter or not file.is_file():
        return {}
    found = read_json(file)
    is_ours = isinstance(found, dict) and found.pop("type", None) == "dit"
    return {name: value for name, value in found.items() if name in DiTConfig.__dataclass_fields__} if is_ours else {}


def _from_dataset(config: RunConfig, asked: dict[str, Any]) -> dict[str, Any]:
    """Network settings that the data set determines, as far as they differ from `config`."""
    path = asked.get("data.path", config.data.path)
    if path is None or asked.get("data.mock", config.data.mock):
        return {}
    from megadit.train.dataset.dataset_info import DatasetInfo

    try:
        info = DatasetInfo.read(path)
    except (UserError, TypeError):  # reported when the samples are read
        return {}
    facts = {setting: getattr(info, fact) for setting, fact in OF_DATASET.items()}
    return {setting: fact for setting, fact in facts.items() if not agree(getattr(config.model, setting), fact)}


def config_from_dict(values: dict[str, Any]) -> RunConfig:
    """The inverse of `dataclasses.asdict`; tuples may be lists, and keys those of NeMo and DFM. Raises UserError for
    unknown or missing keys and values of the wrong type."""
    return _build(RunConfig, _in_our_names(values), path="", root=RunConfig)


def load_config(path: str | Path) -> RunConfig:
    """Reads a complete config.yaml, as `to_yaml` wrote it. Raises UserError if the file is missing, broken or
    incomplete."""
    values = read_yaml(path)  # it may come from anybody: plain YAML, because OmegaConf would resolve ${oc.env:NAME}
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold keys such as `train:` and `model:`, not a list")
    return config_from_dict(values)


def to_yaml(config: Any) -> str:
    """The whole configuration as YAML; `load_config` reads that of a run back."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


@cache
def config_keys(config_class: type = RunConfig, prefix: str = "") -> tuple[str, ...]:
    """The dotted names of all values, such as `optimizer.lr`."""
    keys, hints = [], _hints(config_class)
    for name in (field.name for field in dataclasses.fields(config_class)):  # class variables are no settings
        hint = hints[name]
        section = next((part for part in (hint, *get_args(hint)) if dataclasses.is_dataclass(part)), None)
        if section is not None:
            keys += config_keys(section, f"{prefix}{name}.NAME." if get_origin(hint) is dict else f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return tuple(keys)


@cache
def _hints(config_class: type) -> dict[str, Any]:
    """Annotations of the fields, which every section of every configuration asks for."""
    return get_type_hints(config_class)


def _named_by_the_user(config_class: type) -> list[str]:
    """Fields that map user-chosen names to sections."""
    return [name for name, hint in _hints(config_class).items() if get_origin(hint) is dict]


def _plain(config: DictConfig) -> dict[str, Any]:
    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(first_line(error)) from error


def _in_our_names(values: dict[str, Any]) -> dict[str, Any]:
    return _nest(translate(flatten(values), set(config_keys())))


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        section = nested
        for part in sections:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise UserError(f"{key} and {key.rpartition('.')[0]} cannot both be set")
        section[name] = value
    return nested


def _merge(base: DictConfig, update: DictConfig, root: type) -> DictConfig:
    keys = flatten(OmegaConf.to_container(update))
    try:
        return OmegaConf.unsafe_merge(base, update)  # in place, without copies of both
    except ConfigKeyError as error:
        unknown = error.full_key  # only up to the first unknown section
        whole = next(key for key in keys if f"{key}.".startswith(f"{unknown}."))
        raise _unknown_key(whole, root) from error
    except OmegaConfBaseException as error:  # the only one left: a single value in place of a list
        raise UserError(f"{error.full_key} is a list; write {error.full_key}=[...]") from error
    except TypeError as error:
        raise _other_container(OmegaConf.to_container(base), OmegaConf.to_container(update)) from error


def _other_container(base: dict[str, Any], update: dict[str, Any], prefix: str = "") -> UserError | None:
    """The complaint of the first list in place of a section, or section in place of a list."""
    for name, value in update.items():
        key, known = f"{prefix}{name}", base.get(name)
        if isinstance(known, list | tuple) and isinstance(value, dict):
            return UserError(f"{key} is a list; write {key}=[...]")
        if isinstance(known, dict) and isinstance(value, list):
            return _of_section(key, value)
        if isinstance(known, dict) and (found := _other_container(known, value, f"{key}.")):
            return found
    return None


def _of_section(key: str, value: Any) -> UserError:
    return UserError(f"{key} holds several keys and cannot be set to {value!r}; set one of them, as {key}.key=")


def _unknown_key(key: str, root: type) -> UserError:
    known = config_keys(root)
    last = key.rpartition(".")[2]
    same_name = [name for name in known if name.rpartition(".")[2] == last or name == OTHER_WORDS.get(last)]
    by_name = {name.rpartition(".")[2]: name for name in known}
    near = same_name[0] if same_name else nearest(key, known) or by_name.get(nearest(last, by_name) or "")
    hint = f"did you mean {near}?" if near else "see --print-config for all of them"
    return UserError(f"unknown key {key}; {hint}")


def _build(config_class: type, values: Any, path: str, root: type) -> Any:
    """Build a dataclass from a mapping; every value is checked against the annotation of its field.

    `path` is its dotted path within `root`.
    """
    if not isinstance(values, dict):
        raise _of_section(path, values)
    prefix = f"{path}." if path else ""
    hints = _hints(config_class)
    for key in values:
        if key not in hints:
            raise _unknown_key(f"{prefix}{key}", root)
    required = {field.name for field in dataclasses.fields(config_class) if _has_no_default(field)}
    if missing := sorted(required - values.keys()):
        raise UserError(f"{prefix}{missing[0]} is missing")
    return config_class(**{key: _convert(value, hints[key], prefix + key, root) for key, value in values.items()})


def _has_no_default(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(value: Any, hint: Any, path: str, root: type) -> Any:
    """`value` as the annotation demands: lists become tuples, integers become floats, nothing else is changed."""
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, path, root)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):  # `X | None`, and words in place of a number
        words = [word for part in arguments if get_origin(part) is Literal for word in get_args(part)]
        is_whole = value in words or (value is None and types.NoneType in arguments)
        return value if is_whole else _convert(value, arguments[0], path, root)
    if origin is dict and isinstance(value, dict):
        return {name: _build(arguments[1], section, f"{path}.{name}", root) for name, section in value.items()}
    if origin is tuple and isinstance(value, list | tuple):
        return _convert_items(value, arguments, hint, path, root)
    if origin is Literal:
        return choose_one(value, arguments, f"{path}={value!r} is unknown")
    if hint is float and type(value) is int:
        return float(value)
    if origin is None and type(value) is hint:
        return value
    raise _wrong_type(value, hint, path)


def _convert_items(values: list | tuple, arguments: tuple, hint: Any, path: str, root: type) -> tuple:
    if arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(values)
    if len(values) != len(arguments):
        raise _wrong_type(list(values), hint, path)
    return tuple(_convert(value, item, path, root) for value, item in zip(values, arguments, strict=True))


def _wrong_type(value: Any, hint: Any, path: str) -> UserError:
    expected = getattr(hint, "__name__", str(hint)) if get_origin(hint) is None else str(hint)
    quote = f"; quote it: {path}='\"{value}\"'" if hint is str and isinstance(value, int | float) else ""
    return UserError(f"{path}={value!r} is {type(value).__name__}, expected {expected}{quote}")
