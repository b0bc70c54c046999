"""Recipes by name."""

from collections.abc import Callable

from megadit.train.config.schema import RunConfig

RECIPES: dict[str, Callable[[], RunConfig]] = {}


def recipe(function: Callable[[], RunConfig]) -> Callable[[], RunConfig]:
    """Registers a recipe under the function's name."""
    RECIPES[function.__name__] = function
    return function
