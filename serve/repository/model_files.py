"""A model's folder in a repository: config.pbtxt, model.py, and the bundle."""

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from megadit.models.shared.errors import UserError
from megadit.models.shared.outside import check_own

_MODEL_PY = '''"""Triton loads this file; the model itself is in the installed megadit."""

from megadit.serve.backend.{module} import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def check_replaceable(path: Path, models: Collection[str]) -> None:
    """Raises UserError for a folder that is not a repository with one of our `models`."""
    if path.is_dir() and any(path.iterdir()) and not any((path / name / "config.pbtxt").is_file() for name in models):
        raise UserError(f"{path} holds no {' or '.join(models)} but other files, and would be replaced; choose another")


def write_model(repository: Path, name: str, *, config: str, module: str, bundle: Path) -> Path:
    """Writes the model `name`, implemented by `megadit.serve.backend.{module}`, and returns its copy of the bundle.

    If `bundle` is in the repository already, its files are shared, so that large weights are stored once.
    """
    check_own(bundle)
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(config, encoding="utf-8")
    (version / "model.py").write_text(_MODEL_PY.format(module=module), encoding="utf-8")
    copy = os.link if bundle.is_relative_to(repository) else shutil.copy2
    shutil.copytree(bundle, version / "bundle", copy_function=copy)
    return version / "bundle"
