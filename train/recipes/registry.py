"""Recipes by name."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, wraps
from typing import Any, TypeVar, get_type_hints

from megadit.train.config.schema import RunConfig

RECIPES: dict[str, Callable[[], RunConfig]] = {}
Config = TypeVar("Config")
_hints = cache(get_type_hints)


def recipe(function: Callable[[], RunConfig]) -> Callable[[], RunConfig]:
    """Registers a recipe under the function's name, which is also that of its folder in runs/."""
    name = function.__name__

    @wraps(function)
    def named() -> RunConfig:
        return variant(function(), recipe=name, train={"output_dir": f"runs/{name}"})

    RECIPES[name] = named
    return named


def run_of(**sections: Any) -> RunConfig:
    """A run of these sections, each a mapping; values that are left out have their defaults."""
    return _built(RunConfig, {"recipe": "", **sections})


def _built(kind: type[Config], values: Mapping[str, Any]) -> Config:
    kinds, built = _hints(kind), dict(values)
    built |= {name: _built(kinds[name], each) for name, each in values.items() if isinstance(each, Mapping)}
    return kind(**built)


def variant(config: Config, **changes: Any) -> Config:
    """The configuration with other values; those of a section in a mapping: `variant(digits(), data={"mock": True})`.
    Raises TypeError for an unknown field."""
    nested = {
        name: variant(getattr(config, name), **value) for name, value in changes.items() if isinstance(value, Mapping)
    }
    return replace(config, **changes | nested)
