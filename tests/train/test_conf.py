"""The files in train/conf/ are the recipes that they name, with places to fill in."""

from dataclasses import asdict
from pathlib import Path

import pytest

import megadit.train
from megadit.train.config.load import config_keys, resolve_config
from megadit.train.recipes import RECIPES, load_recipe

FILES = sorted((Path(megadit.train.__file__).parent / "conf").glob("*.yaml"))
PLACES = {"data.path", "train.output_dir", "checkpoint.init_from", "validation.prompts"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_changes_nothing_but_places(path):
    assert path.stem in RECIPES
    ours, theirs = (asdict(run) for run in (resolve_config(config_file=path), load_recipe(path.stem)))

    def value(values, key):
        for part in key.split("."):
            values = None if values is None else values[part]
        return values

    assert ours["data"]["path"]
    assert {key for key in config_keys() if value(ours, key) != value(theirs, key)} <= PLACES
