"""The wheel holds what the repository holds, and works where the repository is not."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Collection
from functools import cache
from importlib import metadata
from pathlib import Path

import count
import pytest
from packaging.utils import canonicalize_name

from .bundles import write_tiny_bundle
from .documents import smaller
from .test_deploy import distributions

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = ("models", "infer", "train", "export", "serve")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def folders_with_python_files() -> set[str]:
    files = [file for folder in FOLDERS for file in (REPOSITORY / folder).rglob("*.py")]
    return {"megadit", *("megadit." + ".".join(file.parent.relative_to(REPOSITORY).parts) for file in files)}


def test_packages_are_the_folders_on_disk():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders_with_python_files()


def test_every_package_has_an_init():
    missing = [
        package
        for package in folders_with_python_files()
        if not (REPOSITORY / Path(*(package.split(".")[1:] or ["megadit"])) / "__init__.py").is_file()
    ]
    assert not missing


def test_no_package_at_the_root():
    assert not (REPOSITORY / "__init__.py").exists()
    assert sorted(path.name for path in (REPOSITORY / "megadit").iterdir() if path.suffix) == [
        "__init__.py",
        "py.typed",
    ]


def test_constraints_pin_every_dependency():
    pinned = {canonical(line.split("==")[0]) for line in (REPOSITORY / "constraints.txt").read_text().splitlines()}
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    wanted += project["optional-dependencies"]["dev"]
    assert {canonical(re.split(r"[\[<>=!~ ]", requirement)[0]) for requirement in wanted} <= pinned


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def test_import_contracts_name_every_folder():
    contract = PROJECT["tool"]["importlinter"]["contracts"][0]
    assert set(re.findall(r"megadit\.(\w+)", " ".join(contract["layers"]))) == set(FOLDERS)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    # pip builds in the source folder: without a build folder of its own, stale files of earlier builds would come along
    subprocess.run([*command, str(copy_of_sources(folder))], check=True)
    return next(folder.glob("megadit-*.whl"))


def copy_of_sources(folder: Path) -> Path:
    """The tracked and new files alone, as in a fresh clone."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    source = folder / "source"
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    return source


@pytest.fixture(scope="module")
def run_installed(wheel, tmp_path_factory):
    """Runs a command of a fresh venv that holds only our wheel; third-party libraries come from this interpreter."""
    home = tmp_path_factory.mktemp("elsewhere")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "venv")], check=True)
    python = home / "venv" / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        check=True,
        text=True,
    ).stdout.strip()
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True)
    # Only plain folders are added: a .pth of this interpreter would bring in the editable installation.
    Path(site, "third_party.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))

    def run(*arguments: str, given: str = "") -> subprocess.CompletedProcess:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment["PATH"] = f"{python.parent}:{environment['PATH']}"
        return subprocess.run(
            [python.parent / arguments[0], *arguments[1:]],
            cwd=home,
            env=environment,
            input=given,
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.slow
def test_wheel_holds_every_package_and_the_yaml_files(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        assert f"{package.replace('.', '/')}/__init__.py" in names
    assert "megadit/train/conf/digits.yaml" in names
    assert "megadit/py.typed" in names
    assert not [name for name in names if name.startswith(("models/", "tests/")) or "/tests/" in name]


@pytest.mark.slow
def test_installed_command_builds_a_model_repository(run_installed, tmp_path):
    bundle, repository = write_tiny_bundle(tmp_path / "bundle").path, tmp_path / "models"
    done = run_installed("megadit", "serve", "build-repository", str(bundle), str(repository))
    assert done.returncode == 0, done.stderr
    assert (repository / "text_to_video" / "config.pbtxt").is_file()
    assert "megadit.serve.backend.triton_model" in (repository / "text_to_video" / "1" / "model.py").read_text()


@pytest.mark.slow
def test_help_describes_the_installed_package(run_installed):
    program = "import megadit; help(megadit); help(megadit.TextToVideo); print(megadit.__version__, megadit.__file__)"
    done = run_installed("python", "-c", program)
    assert done.returncode == 0, done.stderr
    assert "from_pretrained" in done.stdout and "video.save" in done.stdout and "elsewhere" in done.stdout


NOTEBOOK = REPOSITORY / "docs" / "first_model.ipynb"
EXECUTE = """
import json, sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.reads(sys.stdin.read(), as_version=4)
NotebookClient(notebook, timeout=1500, kernel_name="python3").execute()
print(json.dumps([cell.outputs for cell in notebook.cells if cell.cell_type == "code"]))
"""


@pytest.mark.slow
def test_the_notebook_prepares_trains_and_shows_videos(run_installed):
    """On small data, as the pages are run."""
    for library in ("nbclient", "ipykernel"):
        pytest.importorskip(library, reason=f"{library} is not installed (megadit[dev])")
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        small = re.sub(r"^!(.*)$", lambda line: f"!{smaller(line[1])}", "".join(cell["source"]), flags=re.M)
        cell["source"] = small.replace("logger.curves=false", "")  # it shows them
    done = run_installed("python", "-c", EXECUTE, given=json.dumps(notebook))
    assert done.returncode == 0, done.stderr
    prepared, trained, curves, bundled, opened, shown = json.loads(done.stdout)
    assert "train, 60 val samples" in told(prepared) and "done: 2 of 2 steps" in told(trained), told(trained)
    assert "image/png" in curves[-1]["data"] and "<TextToVideo megadit" in opened[-1]["data"]["text/plain"], bundled
    assert shown[-1]["data"]["text/html"].count("data:video/mp4;base64,") == 2
    assert shown[-1]["data"]["text/plain"].startswith("[<GeneratedVideo 'a red seven moving left', seed 1: ")


def told(outputs: list[dict]) -> str:
    """What a cell has printed."""
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


def test_the_notebook_is_as_it_was_before_it_ran():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


# ------------------------------------------------------------------------------------ what is imported is asked for

OF_THE_MACHINE = {
    "megatron": "megatron-core and megatron-energon share the name",
    "tensorrt": "[trt], which the machine brings",
    "transformer_engine": "[te], which has no wheel for every machine",
    "triton": "torch's, on machines that it has kernels for",
    "triton_python_backend_utils": "in Triton's own Python",
    "openai": "of the program to copy that uses it",
}
"""Imported without a distribution that is installed under the name -> why."""
MADE_AT_ONCE = {
    "megadit": (),
    "models": ("train",),  # models/megatron/, which training alone imports
    "infer": ("serve",),  # infer/evaluate/service.py, which asks a service
    "train": ("train",),
    "export": ("export",),
    "serve": ("serve",),
}
"""Folder -> the extras beside the dependencies that its modules may import where they begin."""


def third_party(tree: ast.Module, *, at_once: bool) -> set[str]:
    """Names that a file imports of others: where it begins, or anywhere."""
    names: set[str] = set()
    for node in tree.body if at_once else [each for each, _ in count.statements(tree)]:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"megadit"}


def files_of(folder: str) -> dict[str, ast.Module]:
    paths = sorted((REPOSITORY / folder).rglob("*.py"))
    return {name: count.tree(name) for name in (path.relative_to(REPOSITORY).as_posix() for path in paths)}


distributions_of_imports = cache(metadata.packages_distributions)
known_with = cache(distributions)


def unknown_in(folder: str, extras: Collection[str], *, at_once: bool) -> dict[str, set[str]]:
    """File -> what it imports that neither the dependencies nor these extras lead to."""
    of_import, known = distributions_of_imports(), known_with(tuple(extras))
    found = {
        path: {
            name
            for name in third_party(tree, at_once=at_once) - set(OF_THE_MACHINE)
            if not known & {canonicalize_name(each) for each in of_import.get(name, [name])}
        }
        for path, tree in files_of(folder).items()
    }
    return {path: names for path, names in found.items() if names}


@pytest.mark.parametrize("folder", MADE_AT_ONCE)
def test_what_is_imported_at_once_comes_with_the_package(folder):
    assert not unknown_in(folder, MADE_AT_ONCE[folder], at_once=True)


@pytest.mark.parametrize("folder", MADE_AT_ONCE)
def test_whatever_is_imported_is_asked_for_by_some_extra(folder):
    every = sorted(set(PROJECT["project"]["optional-dependencies"]) - {"dev", "docs", "te", "trt"})
    assert not unknown_in(folder, every, at_once=False)


def test_an_import_that_nobody_asks_for_is_noticed(tmp_path, monkeypatch):
    tree = ast.parse("import os, httpx.auth\nfrom megadit import x\ndef f():\n    from yaml import safe_load")
    assert third_party(tree, at_once=True) == {"httpx"} and third_party(tree, at_once=False) == {"httpx", "yaml"}
    monkeypatch.setattr(sys.modules[__name__], "files_of", lambda folder: {"a.py": tree})
    assert unknown_in("infer", (), at_once=True) == {"a.py": {"httpx"}} and not unknown_in(
        "infer", ["serve"], at_once=True
    )
