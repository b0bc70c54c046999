"""Finds this machine's tritonserver, and prepares its environment.

NVIDIA's container has one on its PATH, with every backend. Elsewhere the `nvidia-pytriton` package contains the same
server with the Python backend, which needs two things that are made here once and cached:

- one directory with the backend's library and the stub of this Python version side by side;
- an environment with numpy 1 before the packages of this one, because that backend was built for numpy 1: with numpy 2
  it passes wrong numbers without an error.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

from megadit.models.shared.cli.command import python_module
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import atomic_directory, cache_folder, held_alone

NUMPY = "numpy==1.26.4"


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonBinary:
    """An executable tritonserver, its extra arguments and environment."""

    path: Path
    arguments: tuple[str, ...] = ()
    environment: dict[str, str]

    def with_its_path(self, argument: str) -> list[str]:
        """The argument, if this release of Triton has its option."""
        usage = subprocess.run([str(self.path), "--help"], env=self.environment, capture_output=True, text=True)
        return [argument] if argument.partition("=")[0] in usage.stdout + usage.stderr else []


def find_triton() -> TritonBinary:
    """The tritonserver on the PATH, else the one inside `nvidia-pytriton`. Raises UserError if there is neither, or the
    environment of the second cannot be made."""
    vendors = shutil.which("tritonserver")
    if vendors:
        return TritonBinary(path=Path(vendors), environment=dict(os.environ))
    home = _pytriton_home()
    prepared = prepare(home)
    libraries = [home.parent.parent / "nvidia_pytriton.libs", Path(sysconfig.get_config_var("LIBDIR"))]
    return TritonBinary(
        path=home / "bin" / "tritonserver",
        arguments=(f"--backend-directory={prepared / 'backends'}",),
        environment=os.environ
        | {
            "LD_LIBRARY_PATH": _joined(*map(str, libraries), os.environ.get("LD_LIBRARY_PATH")),
            # The stub embeds the interpreter that it finds first on the PATH.
            "PATH": _joined(str(prepared / "python" / "bin"), os.environ.get("PATH")),
        },
    )


def prepare(home: Path) -> Path:
    """The cached directory with `backends/` and `python/` (the environment with numpy 1); made if it is missing. Raises
    UserError if pip cannot install numpy 1."""
    recipe = "\n".join([NUMPY, sys.version, sys.prefix, str(home), *_package_folders()])
    directory = cache_folder() / f"triton-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if directory.is_dir():
        return directory
    with held_alone(directory.with_name(f".{directory.name}.lock")):
        if not directory.is_dir():  # no other process made it meanwhile
            compiled = (
                f"; {NUMPY} is compiled for this Python, which takes minutes" if sys.version_info >= (3, 13) else ""
            )
            print(f"Preparing the environment of Triton's Python backend (once{compiled})", file=sys.stderr)
            with atomic_directory(directory) as temporary:
                _collect_backend(home, temporary / "backends" / "python")
                _make_environment(temporary / "python")
    return directory


def _pytriton_home() -> Path:
    package = importlib.util.find_spec("pytriton")
    home = Path(package.origin).parent / "tritonserver" if package else None
    if home is None or not (home / "bin" / "tritonserver").is_file():
        raise UserError(
            "there is no tritonserver here: `pip install --no-deps nvidia-pytriton` installs one for tests and small "
            "services; for production, `megadit serve run REPO --docker` prints the command of the vendor's container"
        )
    return home


def _collect_backend(home: Path, directory: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = home / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        have = ", ".join(sorted(folder.name for folder in (home / "python_backend_stubs").iterdir()))
        raise UserError(f"nvidia-pytriton's Triton has no stub for Python {version}, only for {have}")
    directory.mkdir(parents=True)
    for file in [*(home / "backends" / "python").glob("*.*"), stub]:
        (directory / file.name).symlink_to(file)


def _make_environment(directory: Path) -> None:
    """Make a virtual environment with numpy 1, followed by all package folders of this interpreter."""
    venv.create(directory, with_pip=False, symlinks=True)
    site_packages = next(directory.glob("lib/python*/site-packages"))
    command = python_module("pip", "install", "--quiet", "--no-deps", "--target", str(site_packages), NUMPY)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise UserError(
            f"Triton's Python backend needs {NUMPY} in an environment of its own, and pip cannot get it ({reason}); "
            "without a network, put its wheel into a folder and set PIP_FIND_LINKS to it"
        )
    lines = [f"import site; site.addsitedir({folder!r})" for folder in _package_folders()]
    (site_packages / "packages_of_the_caller.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _package_folders() -> list[str]:
    """Package folders of this process: PYTHONPATH first, then its environment, without the standard library."""
    paths = [str(Path(folder).absolute()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return list(dict.fromkeys([*paths, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]))


def _joined(*paths: str | None) -> str:
    return os.pathsep.join(filter(None, paths))
