"""Changes of a configuration as users write them: a YAML or TOML file, and `section.key=value` overrides."""

import io
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megadit.models.shared.documents import OLD_NUMBERS, check_yaml
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import read_limited

_LOOKED_UP = re.compile(r"\$\{[^{}]*:")
"""OmegaConf's resolvers, such as ${oc.env:NAME}, which read values from outside the file."""
_MOST_REFERENCES = 1000
"""Maximum product of the numbers of references in each value, by which a value may grow."""


def read_optional(path: str | Path | None) -> DictConfig:
    """The keys of a file; none without one. Raises UserError as `read_config_file`."""
    return read_config_file(path) if path is not None else OmegaConf.create({})


def read_config_file(path: str | Path) -> DictConfig:
    """The keys of a YAML or TOML file. Raises UserError if it cannot be read, or refers to anything outside of
    itself."""
    if not Path(path).is_file():
        shipped = Path(__file__).parents[1] / "conf" / Path(path).name
        hint = f"megadit ships one of this name: {shipped}" if shipped.is_file() else "give the path of a YAML file"
        trouble = "is not a file" if Path(path).exists() else "does not exist"
        raise UserError(f"config file {path} {trouble}; {hint}")
    content = read_limited(path)
    kind = "TOML" if Path(path).suffix.lower() == ".toml" else "YAML"
    try:
        if kind == "TOML":
            config = OmegaConf.create(tomllib.loads(content.decode("utf-8-sig")))
        else:
            check_yaml(content, str(path))
            config = OmegaConf.load(io.BytesIO(content))
    except RecursionError:
        raise UserError(f"{path} is nested too deeply") from None
    except (yaml.YAMLError, tomllib.TOMLDecodeError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid {kind}: {first_line(error)}") from error
    if not isinstance(config, DictConfig):
        raise UserError(f"{path} must hold keys such as `train:` and `model:`, not a list")
    values = flatten(OmegaConf.to_container(config))
    if math.prod(max(1, str(value).count("${")) for value in values.values()) > _MOST_REFERENCES:
        raise UserError(f"{path} refers to its own keys so often that they may grow without end; write the values out")
    for key, value in values.items():
        if _LOOKED_UP.search(str(value)):  # it may be the config.yaml of somebody else's run
            raise UserError(
                f"{path}: {key}={value} refers to something outside the file, and only references to its own keys are "
                f"allowed; give {key}=VALUE on the command line"
            )
    return config


def parse_overrides(overrides: list[str]) -> DictConfig:
    """The keys that `section.key=value` set. Raises UserError for one that is written otherwise, or that sets a section
    beside one of its keys."""
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key:
            raise UserError(f"cannot read {override!r}; write section.key=value, such as train.train_iters=100")
        if key[0] in "+~":
            raise UserError(f"{override!r} would add or delete a key; write section.key=value to set a known one")
        if not all(key.split(".")):
            raise UserError(f"cannot read {override!r}: {key} has a dot too many")
    values = dict(override.split("=", 1) for override in overrides)
    for key, value in values.items():
        if inner := next((other for other in values if other.startswith(f"{key}.")), None):
            raise UserError(f"{key} holds several keys and cannot be set to {value!r} beside {inner}; set one of them")
    found = OmegaConf.create()
    for override in overrides:
        key, _, value = override.partition("=")
        try:
            found.merge_with_dotlist([f'{key}="{value}"' if OLD_NUMBERS.fullmatch(value) else override])
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise UserError(f"cannot read {override!r}: {first_line(error)}") from error
    return found


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}; empty mappings are dropped."""
    flat = {}
    for key, value in values.items():
        if not isinstance(key, str):  # such as no, on and 1
            raise UserError(f"the key {prefix}{key} is {type(key).__name__} to YAML; write it in quotes")
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def first_line(error: Exception) -> str:
    """The first line of a library's error; of an error in YAML, with its line number."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(error).strip().partition("\n")[0]
