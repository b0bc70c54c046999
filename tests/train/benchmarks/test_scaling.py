"""`megadit benchmark scaling`: rows that were measured, rows that were not, and what is said of them."""

import json
from dataclasses import asdict
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from megadit.train.benchmarks import scaling
from megadit.train.benchmarks.scaling import NOT_MEASURED, Row, ideal, table_of
from megadit.train.benchmarks.train import run_of


def write_figures(folder, ranks, seconds, recipe="digits_tiny", steps=10, packs=1, overrides=()):
    measurements = {"samples_per_step": 12.0 * ranks, "seconds": seconds}
    config = asdict(run_of(recipe, None, [*overrides, f"data.global_batch_size={packs * ranks}"]))
    record = {
        "recipe": recipe,
        "config": config,
        "steps": steps,
        "machine": {"ranks": ranks},
        "measurements": measurements,
    }
    (folder / f"ranks-{ranks}.json").write_text(json.dumps(record))


@pytest.fixture
def two_devices(monkeypatch):
    """A machine with two, on which nothing is to be measured."""
    monkeypatch.setattr(scaling, "devices_here", lambda: 2)
    monkeypatch.setattr(scaling.subprocess, "run", lambda *_, **__: pytest.fail("measured again"))


def cells(rows):
    return [list(column.cells) for column in table_of(rows).columns]


def test_speedup_is_that_over_one_rank():
    rows = [Row(ranks=1, samples_per_second=8.0), Row(ranks=2, samples_per_second=12.0)]
    assert cells(rows) == [["1", "2"], ["8.00", "12.00"], ["8.00", "16.00"], ["1.00", "1.50"], ["100%", "75%"]]


def test_what_was_not_measured_says_so_and_is_no_guess():
    rows = [Row(ranks=2, samples_per_second=10.0), Row(ranks=64, samples_per_second=None)]
    assert [column[1] for column in cells(rows)] == ["64", NOT_MEASURED, "320.00", NOT_MEASURED, NOT_MEASURED]
    assert ideal([rows[1]], 64) is None
    assert {column[0] for column in cells([rows[1]])[1:]} == {NOT_MEASURED}


def test_figures_of_a_cluster_are_rows(tmp_path, two_devices, capsys):
    for ranks, seconds in ((1, 1.0), (2, 1.2), (16, 1.6)):
        write_figures(tmp_path, ranks, seconds, packs=2)
    assert scaling.main([str(tmp_path), "--recipe", "digits_tiny", "--ranks", "1,2,16,64", "--packs", "2"]) == 0
    shown = capsys.readouterr().out
    assert "120" in shown and "7.50" not in shown and "10.00" in shown and NOT_MEASURED in shown
    record = json.loads((tmp_path / "scaling.json").read_text())
    assert [row["samples_per_second"] for row in record["rows"]] == [12.0, 20.0, 120.0, None]
    assert record["packs"] == 2
    words = " ".join(ElementTree.parse(tmp_path / "scaling.svg").getroot().itertext())
    assert "digits_tiny" in (tmp_path / "scaling.svg").read_text() or "digits" in words


def test_figures_of_another_run_are_refused(tmp_path, two_devices, capsys):
    write_figures(tmp_path, 1, 1.0, recipe="digits")
    assert scaling.main([str(tmp_path), "--recipe", "digits_tiny", "--ranks", "1"]) == 2
    assert "has results of digits on 1 ranks; delete it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("of_record", "asked", "told"),
    [
        ({}, ["--packs", "2"], "data.global_batch_size=1, not 2"),
        ({}, ["--steps", "2"], "steps=10, not 2"),
        ({}, ["model.num_layers=8"], "model.num_layers=2, not 8"),
        ({"overrides": ["train.num_threads=1"]}, [], "train.num_threads=1, not"),
        (
            {"steps": 2, "packs": 2, "overrides": ["model.num_layers=8"]},
            ["--steps", "2", "model.num_layers=8"],
            "=2, not 1",
        ),
    ],
)
def test_rows_measured_with_other_settings_are_refused(tmp_path, two_devices, capsys, of_record, asked, told):
    write_figures(tmp_path, 1, 1.0, **of_record)
    assert scaling.main([str(tmp_path), "--recipe", "digits_tiny", "--ranks", "1", *asked]) == 2
    said = capsys.readouterr().err
    assert "ranks-1.json has results of a run with" in said and told in said and said.count("\n") == 1


def test_rows_that_do_not_say_what_was_measured_are_refused(tmp_path, two_devices, capsys):
    record = {
        "recipe": "digits_tiny",
        "machine": {"ranks": 1},
        "measurements": {"samples_per_step": 12.0, "seconds": 1.0},
    }
    (tmp_path / "ranks-1.json").write_text(json.dumps(record))
    assert scaling.main([str(tmp_path), "--recipe", "digits_tiny", "--ranks", "1"]) == 2
    assert "does not say with which settings" in capsys.readouterr().err


def test_ranks_that_cannot_share_a_model_are_told_before_anything_is_measured(tmp_path, two_devices, capsys):
    layout = "parallel.tensor_model_parallel_size=2"
    assert scaling.main([str(tmp_path), "--recipe", "digits_tiny", "--ranks", "3", layout]) == 2
    assert "start 2 or 4 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1,two", "0", "", "1,,2"])
def test_ranks_are_numbers(tmp_path, capsys, text):
    assert scaling.main([str(tmp_path), "--ranks", text]) == 2
    assert f"--ranks {text}: write numbers of ranks" in capsys.readouterr().err


@pytest.fixture
def forked_benchmark(run_ranks, monkeypatch):
    """The ranks of `megadit benchmark train` are forked."""

    def run(command, **_):
        _, *words, option, ranks = command
        assert option == "--nproc"
        run_ranks(int(ranks), *words)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(scaling.subprocess, "run", run)


@pytest.mark.slow
def test_ranks_of_this_machine_are_measured(tmp_path, forked_benchmark):
    command = [str(tmp_path), "--recipe", "digits_tiny", "--ranks", "1,2,4096", "--steps", "2"]
    for _ in range(2):  # the second finds its rows measured
        assert scaling.main(command) == 0
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert rows[0]["samples_per_second"] > 0 and rows[1]["samples_per_second"] > 0
    assert rows[2]["samples_per_second"] is None
    one, two = (json.loads((tmp_path / f"ranks-{n}.json").read_text())["measurements"] for n in (1, 2))
    assert two["samples_per_step"] == pytest.approx(2 * one["samples_per_step"], rel=0.35)  # packs are not all alike
