"""`from megadit import ...`: the names that Python users import, and what importing them costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megadit

REPOSITORY = Path(__file__).resolve().parent.parent
NAMES = [name for name in megadit.__all__ if not name.startswith("_")]


def test_importing_megadit_loads_no_library():
    program = """
import sys
before = set(sys.modules)
import megadit
assert "TextToVideo" in dir(megadit) and megadit.__version__[0].isdigit()
from megadit import UserError, SamplingSettings
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True, text=True)
    assert ast.literal_eval(done.stdout) == ["megadit"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_that_of_its_home(name):
    thing = getattr(megadit, name)
    assert thing.__name__ == name and thing.__module__ == megadit._HOMES[name]
    assert thing.__doc__, "help() says what it is"


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(megadit.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    homes = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert homes == megadit._HOMES


def test_a_name_that_does_not_exist():
    with pytest.raises(ImportError, match="TextToVido"):
        from megadit import TextToVido  # noqa: F401
