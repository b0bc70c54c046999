"""The import contracts of pyproject.toml: `lint-imports`, which takes packages below a namespace alone.

So `megadit` is a namespace here: the five folders without megadit/__init__.py, of which no contract speaks.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

from importlinter.cli import lint_imports_command

namespace = ModuleSpec("megadit", None, is_package=True)
namespace.submodule_search_locations = [str(Path(__file__).resolve().parent.parent)]
sys.modules["megadit"] = module_from_spec(namespace)

lint_imports_command()
