"""Recipes: named training runs (`megadit train --recipe NAME`).

A recipe is a function without arguments that returns a complete `RunConfig`; YAML files and `a.b=c` overrides change
single values of it. A `variant` changes values of another recipe. Its docstring has the command at full size,
hardware, tokens, and the memory of a rank as the planner estimates it (`--dry-run`).
"""

from importlib import import_module
from pkgutil import iter_modules

from megadit.models.shared.errors import choose_one
from megadit.train.config.schema import RunConfig
from megadit.train.recipes.registry import RECIPES

for _file in iter_modules(__path__):  # they register themselves
    import_module(f"{__name__}.{_file.name}")


def load_recipe(name: str) -> RunConfig:
    """The configuration of a recipe. Raises UserError for an unknown name, with the nearest known one."""
    return RECIPES[choose_one(name, sorted(RECIPES), f"unknown recipe {name!r}")]()
