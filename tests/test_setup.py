"""`make setup` takes the Python that is there, says what it loads, and says in one line what is missing.

Interpreters and uv are stubs on a PATH of their own; each notes in `calls` what it was asked for.
"""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = (
    "bash",
    "env",
    "make",
    "awk",
    "cat",
    "chmod",
    "cp",
    "date",
    "df",
    "dirname",
    "mkdir",
    "sed",
    "tee",
    "touch",
    "wc",
)
INTERPRETER = """#!/bin/bash
echo "{name} $*" >> "{calls}"
case "$*" in
    *version_info*sys.exit*|*sys.exit*version_info*) exit {is_wrong} ;;
    *ensurepip*) exit {lacks_venv} ;;
    *"print("*) echo {version} ;;
    "-m venv"*) mkdir -p .venv/bin && cp "{venv}" .venv/bin/python ;;
esac
"""
IN_VENV = """#!/bin/bash
echo ".venv/bin/python $*" >> "{calls}"
case "$*" in
    --version) echo Python 3.99 ;;
    *--dry-run*) exit {lacks_cpu_wheels} ;;
    *--editable*)
        for name in $(seq 60); do echo "Collecting package$name"; done
        echo "  Downloading torch-2.whl (530.7 MB)"
        echo "Installing collected packages: everything"
        exit {fails} ;;
esac
"""
UV = """#!/bin/bash
echo "uv $*" >> "{calls}"
case "$*" in
    venv*) mkdir -p .venv/bin && cp "{venv}" .venv/bin/python ;;
    *--dry-run*) exit {lacks_cpu_wheels} ;;
esac
"""


@pytest.fixture
def setup(tmp_path):
    """setup(interpreters, ...): what `make setup` says and asks for, in a folder with a space in its name."""
    bin, project, calls = tmp_path / "bin", tmp_path / "a project", tmp_path / "calls"
    bin.mkdir()
    project.mkdir()
    for name in (*TOOLS, "seq"):
        (bin / name).symlink_to(shutil.which(name))
    for name in ("Makefile", "setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, project)

    def write(path, text, **values):
        path.write_text(text.format(calls=calls, venv=tmp_path / "in_venv", **values))
        path.chmod(0o755)

    def setup(interpreters, *, uv=False, fails=0, lacks_cpu_wheels=1, more=()):
        write(tmp_path / "in_venv", IN_VENV, fails=fails, lacks_cpu_wheels=lacks_cpu_wheels)
        for name, about in interpreters.items():
            version, has_venv = about if isinstance(about, tuple) else (about, True)
            is_wrong = int(version not in ("3.11", "3.12", "3.13"))
            values = {
                "name": name,
                "version": f"python{version}",
                "is_wrong": is_wrong,
                "lacks_venv": int(not has_venv),
            }
            write(bin / name, INTERPRETER, **values)
        if uv:
            write(bin / "uv", UV, lacks_cpu_wheels=lacks_cpu_wheels)
        environment = {"PATH": str(bin), "HOME": str(tmp_path)}
        done = subprocess.run(["make", "setup", *more], cwd=project, env=environment, capture_output=True, text=True)
        return done, calls.read_text() if calls.exists() else "", (project / ".venv/.ready").exists()

    return setup


@pytest.mark.parametrize(
    ("interpreters", "chosen"),
    [
        ({"python3.12": "3.12"}, "python3.12"),
        ({"python3.11": "3.11", "python3.13": "3.13", "python3.12": "3.12"}, "python3.13"),
        ({"python3.11": "3.11", "python3.13": ("3.13", False)}, "python3.11"),
        ({"python3": "3.12"}, "python3"),
        ({"python3": "3.14", "python3.11": "3.11"}, "python3.11"),
        ({"python3.13": "3.9", "python3.11": "3.11"}, "python3.11"),  # a name may stand for anything
    ],
)
def test_the_newest_python_that_makes_environments_is_taken(setup, interpreters, chosen):
    done, calls, is_ready = setup(interpreters)
    assert done.returncode == 0 and is_ready, done.stderr
    assert [line for line in calls.splitlines() if "-m venv" in line] == [f"{chosen} -m venv --clear .venv"]
    assert "--constraint constraints.txt" in calls and "--no-deps nvidia-pytriton" in calls


def test_another_python_is_named(setup):
    done, calls, _ = setup({"python3.13": "3.13", "mine": "3.11"}, more=["PYTHON=mine"])
    assert done.returncode == 0 and "mine -m venv" in calls and "python3.13" not in calls


@pytest.mark.parametrize(
    ("interpreters", "says"),
    [
        ({}, "the PATH has no Python from 3.11 to 3.13; install one"),
        ({"python3": "3.10"}, "no Python from 3.11 to 3.13"),
        ({"python3": "3.14"}, "no Python from 3.11 to 3.13"),
        (
            {"python3": ("3.12", False)},
            "no ensurepip, which makes virtual environments; on Debian and Ubuntu: apt install",
        ),
        ({"python3": ("3.12", False)}, "apt install python3.12-venv"),
    ],
)
def test_what_is_missing_is_said_in_a_line(setup, interpreters, says):
    done, calls, is_ready = setup(interpreters)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode == 2 and len(errors) == 1 and errors[0].startswith("error: ") and says in errors[0]
    assert not is_ready and "-m pip" not in calls


def test_uv_is_taken_where_it_is(setup):
    done, calls, is_ready = setup({"python3.12": "3.12"}, uv=True)
    assert done.returncode == 0 and is_ready, done.stderr
    assert "uv venv --quiet --seed" in calls and "uv pip install --python .venv/bin/python" in calls
    assert "python3.12" not in calls and "-m pip" not in calls


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="a machine with a GPU takes torch with CUDA")
@pytest.mark.parametrize("uv", [False, True])
@pytest.mark.parametrize("lacks_cpu_wheels", [0, 1])
def test_cpu_wheels_are_taken_where_an_index_has_them(setup, lacks_cpu_wheels, uv):
    done, calls, _ = setup({"python3.12": "3.12"}, lacks_cpu_wheels=lacks_cpu_wheels, uv=uv)
    said = ("torch for CPUs", "about 4.2 GB") if not lacks_cpu_wheels else ("torch with CUDA", "about 7.3 GB")
    assert all(words in done.stdout for words in said)
    assert ("--constraint .venv/cpu.txt" in calls) == (not lacks_cpu_wheels)
    assert ("note: no index of torch's CPU wheels" in done.stdout) == bool(lacks_cpu_wheels)


def test_a_full_disk_is_said_before_anything_is_loaded(setup, tmp_path):
    (tmp_path / "bin/df").unlink()
    (tmp_path / "bin/df").write_text("#!/bin/bash\necho title\necho disk 10 10 2000000 50% /\n")
    (tmp_path / "bin/df").chmod(0o755)
    done, calls, is_ready = setup({"python3.12": "3.12"})
    assert "a project/.venv takes about 7.3 GB, and its disk has 2.0 GB" in done.stderr and not is_ready
    assert "--editable" not in calls


def test_progress_is_shown_and_a_failure_leaves_nothing_ready(setup):
    done, _, is_ready = setup({"python3.12": "3.12"}, fails=1)
    shown = [line.strip() for line in done.stdout.splitlines()]
    assert any(line.startswith("50 of about") for line in shown), shown
    assert "Downloading torch-2.whl (530.7 MB)" in shown and "installing them" in shown
    assert done.returncode == 2 and not is_ready and "error: the installation failed" in done.stderr


def test_what_is_said_of_python_is_what_is_taken():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14"
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert named == ["3.11", "3.12", "3.13"]
    assert os.access(ROOT / "setup.sh", os.X_OK)
