"""Options of the training command do something; those of the planner are tried in plan/test_plan.py."""

import pytest
import yaml

from megadit.train.__main__ import _parse, main
from megadit.train.recipes import RECIPES


def shown(capsys, *argv):
    assert main([*argv, "--print-config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_options_reach_the_run(capsys, tmp_path):
    plain = shown(capsys, "--recipe", "digits")
    assert shown(capsys, "--factory", "digits_tiny") != plain
    assert shown(capsys, "--recipe", "digits", "--mock")["data"]["mock"] and not plain["data"]["mock"]
    assert shown(capsys, "--recipe", "digits", "--dataset-path", "x")["data"]["path"] == "x" != plain["data"]["path"]
    (tmp_path / "a.yaml").write_text("train: {seed: 77}")
    assert shown(capsys, "--recipe", "digits", "--config-file", str(tmp_path / "a.yaml"))["train"]["seed"] == 77
    assert shown(capsys, "--recipe", "digits", "--yes") == shown(capsys, "--recipe", "digits", "-y") == plain, (
        "nothing is ever asked"
    )


def test_options_of_the_command(capsys):
    assert main(["--recipe", "digits", "--dry-run"]) == 0
    assert "parameters:" in capsys.readouterr().out
    assert _parse(["--recipe", "digits", "--nproc", "3"]).nproc == 3
    assert main(["--recipe", "digits", "--nproc", "0"]) == 2


def test_help_has_recipes_in_columns(capsys):
    """However long a name is: what a recipe does begins in the same column on every line."""
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out.partition("recipes:\n")[2].splitlines()
    columns = set()
    for name, function in RECIPES.items():
        (line,) = [line for line in shown if line.split()[:1] == [name]]
        columns.add(line.index(function.__doc__.partition("\n")[0]))
    assert columns == {4 + max(map(len, RECIPES))}
