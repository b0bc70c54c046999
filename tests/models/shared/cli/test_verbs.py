"""The `megadit` command: its help, its errors, and what it does not import."""

import re
import subprocess
import sys

import pytest

from megadit.models.shared.cli import verbs


def test_help_lists_every_verb(capsys):
    assert verbs.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for verb, (_, description) in verbs.VERBS.items():
        assert f"  {verb} " in shown
        assert description in shown


def test_every_verb_stands_in_one_group_and_those_of_a_first_model_come_first(capsys):
    assert sorted(verb for names in verbs.GROUPS.values() for verb in names) == sorted(verbs.VERBS)
    verbs.main([])
    shown = re.findall(r"^  (\S+)", capsys.readouterr().out, re.MULTILINE)
    assert shown[:5] == ["new", "prepare", "train", "bundle", "generate"]


def test_no_arguments_show_the_help(capsys):
    assert verbs.main([]) == 0
    assert "usage: megadit VERB" in capsys.readouterr().out


def test_version(capsys):
    assert verbs.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("megadit 0.")


@pytest.mark.parametrize(
    ("verb", "hint"), [("trian", "did you mean 'train'?"), ("qqqqq", "see `megadit --help`"), ("--trian", "train")]
)
def test_unknown_verb_is_one_line(capsys, verb, hint):
    assert verbs.main([verb]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert hint in error


def test_verbs_of_two_words_are_found_and_listed(capsys):
    assert verbs.main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "serve ask" in shown and "generate" not in shown


@pytest.mark.parametrize(("argv", "hint"), [(["serve"], "build-repository, run"), (["serve", "asc"], "'ask'")])
def test_unknown_second_word_is_one_line(capsys, argv, hint):
    assert verbs.main(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert hint in error


def test_help_imports_neither_torch_nor_megatron():
    program = (
        "import sys; from megadit.models.shared.cli import verbs; verbs.main(['--help']);"
        "print([name for name in ('torch', 'megatron', 'numpy', 'omegaconf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_verb_is_a_function_with_its_own_help(capsys, verb):
    try:
        code = verbs.main([*verb.split(), "--help"])
    except SystemExit as stop:  # how argparse leaves
        code = stop.code
    assert not code
    assert f"megadit {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_debug_is_accepted_by_every_verb(verb):
    with pytest.raises((SystemExit, Exception)) as stop:
        verbs.main([*verb.split(), "--debug", "--no-such-option"])
    assert "--debug" not in str(stop.value)


def test_missing_library_is_named(capsys, monkeypatch):
    monkeypatch.setitem(verbs.VERBS, "missing", ("no_such_library.module:main", ""))
    assert verbs.main(["missing"]) == 2
    assert "needs the library no_such_library" in capsys.readouterr().err


def test_own_missing_module_is_a_fault_not_a_user_error(monkeypatch):
    monkeypatch.setitem(verbs.VERBS, "missing", ("megadit.no_such_module:main", ""))
    with pytest.raises(ModuleNotFoundError):
        verbs.main(["missing"])


def test_debug_shows_the_traceback(monkeypatch):
    with pytest.raises(ValueError, match="unknown command"):
        verbs.main(["trian", "--debug"])
