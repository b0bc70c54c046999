"""The script of `megadit completion` completes verbs, sources, options and words that an option takes."""

import shutil
import subprocess

import pytest

from megadit.models.shared.cli.completion import main

CASES = {
    "megadit ge": "generate",
    "megadit serve ": "build-repository run up gateway keys webhooks ask demo",
    "megadit serve up --drain_": "--drain_seconds",
    "megadit generate --pro": "--prompt --prompt_file",
    "megadit generate --format ": "mp4 gif webp png jpg safetensors",
    "megadit prepare vid": "videos",
    "megadit prepare videos data --min_con": "--min_contrast",
    "megadit evaluate tokenizer --cou": "--count",
    "megadit train --rec": "--recipe",
}
ASK = """
source "$1"
shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_megadit megadit "${COMP_WORDS[$COMP_CWORD]}"
echo "${COMPREPLY[*]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    import contextlib
    import io

    path, told = tmp_path_factory.mktemp("completion") / "megadit", io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main(["bash"]) == 0
    path.write_text(told.getvalue())
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize("typed", CASES)
def test_bash_completes(script, typed):
    done = subprocess.run(["bash", "-c", ASK, "bash", script, *typed.split(" ")], capture_output=True, text=True)
    assert done.stdout.strip() == CASES[typed], done.stderr


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_theirs(shell, capsys):
    assert main([shell]) == 0
    assert "generate" in capsys.readouterr().out
