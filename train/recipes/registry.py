"""Recipes by name."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

from megadit.train.config.schema import RunConfig

RECIPES: dict[str, Callable[[], RunConfig]] = {}
Config = TypeVar("Config")


def recipe(function: Callable[[], RunConfig]) -> Callable[[], RunConfig]:
    """Registers a recipe under the function's name, which is also that of its folder in runs/."""
    name = function.__name__

    @wraps(function)
    def named() -> RunConfig:
        return variant(function(), recipe=name, train={"output_dir": f"runs/{name}"})

    RECIPES[name] = named
    return named


def variant(config: Config, **changes: Any) -> Config:
    """The configuration with other values; those of a section in a mapping: `variant(digits(), data={"mock": True})`.
    Raises TypeError for an unknown field."""
    nested = {
        name: variant(getattr(config, name), **value) for name, value in changes.items() if isinstance(value, Mapping)
    }
    return replace(config, **changes | nested)
