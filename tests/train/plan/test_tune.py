"""`megadit train --tune`: layouts measured in processes of their own, whatever becomes of each."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megadit.models.shared.errors import UserError
from megadit.train.__main__ import main
from megadit.train.config.load import resolve_config
from megadit.train.plan import tune as tuning
from megadit.train.plan.estimate import Calibration, estimate_step
from megadit.train.plan.hardware import find_gpu
from megadit.train.plan.layout import Layout
from megadit.train.plan.tune import fit_measured
from megadit.train.recipes import load_recipe

GPU = find_gpu("h100-80gb")
SMALL = (
    *("data.mock=true", "data.num_workers=0", "data.global_batch_size=4", "data.seq_length=64"),
    *("data.text_seq_length=16", "data.mock_latent_shapes=[[1,8,8]]", "validation.interval=0"),
)


@pytest.fixture
def run(tmp_path):
    return resolve_config("digits_tiny", overrides=[*SMALL, f"train.output_dir={tmp_path / 'run'}"])


@pytest.fixture
def programs(monkeypatch):
    """programs(script, ...): what measures the first layout, the second, ...; `took(seconds)` works, and one
    that sleeps is given no time: on a busy machine the others may need theirs."""
    run_process = tuning._run_process
    monkeypatch.setattr(
        tuning,
        "_run_process",
        lambda words, log, seconds: run_process(words, log, 0.5 if "sleep" in words[-1] else seconds),
    )

    def kind(*scripts):
        calls = iter(scripts)

        def command(run, overrides, ranks, steps, numbers):
            script = next(calls)
            used.append(overrides)
            return [sys.executable, "-c", script.replace("FIGURES", str(numbers))]

        used = []
        monkeypatch.setattr(tuning, "command", command)
        return used

    return kind


def took(seconds):
    return f"open('FIGURES', 'w').write('{{\"measurements\": {{\"seconds\": {seconds}, \"peak_memory_gb\": 1.0}}}}')"


def rows(run):
    return json.loads((Path(run.train.output_dir) / "tune" / "rows.json").read_text())


def tune(run, **more):
    return tuning.tune(run, GPU, **{"ranks": 2, "top": 5, "steps": 1, "seconds": 120.0, **more})


def test_whatever_becomes_of_a_layout_is_a_row_and_the_fastest_wins(run, programs, capsys):
    used = programs(
        took(0.5),
        "import sys; print('that was too much'); sys.exit(3)",
        "raise MemoryError('CUDA out of memory. Tried to allocate')",
        "import time; time.sleep(60)",
        took(0.25),
    )
    path = tune(run)
    found = {row["outcome"]: row for row in rows(run)}
    assert [row["outcome"] for row in rows(run)] == ["measured", "crashed", "out of memory", "hung", "measured"]
    assert found["crashed"]["said"] == "that was too much" and found["hung"]["said"] == "no end after 2 min 0 s"
    best = resolve_config(config_file=path)
    assert Layout.of(best, 2) == Layout.of(resolve_config(config_file=path, overrides=used[4]), 2)
    assert best.model == run.model and best.data.global_batch_size == 4
    assert f"megadit train --config-file {path} --nproc 2" in capsys.readouterr().out


def test_what_was_measured_is_not_measured_again(run, programs, monkeypatch, tmp_path):
    """Interrupted while the third is measured, as by Ctrl-C: a signal of this process' own may be lost in a callback of
    the garbage collector's."""
    begun, wait = tmp_path / "begun", subprocess.Popen.wait

    def interrupted(process, timeout=None):
        if timeout is None or "pause" not in process.args[-1]:
            return wait(process, timeout)
        while not (begun.exists() and begun.read_text()):
            assert process.poll() is None
            time.sleep(0.01)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(subprocess.Popen, "wait", interrupted)
        note = f"import os, signal; open({str(begun)!r}, 'w').write(str(os.getpid())); signal.pause()"
        programs(took(0.5), took(0.4), note)
        tune(run)
    assert len(rows(run)) == 2
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)
    programs(took(0.3), took(0.2), took(0.6))
    tune(run)
    assert [row["seconds"] for row in rows(run)] == [0.5, 0.4, 0.3, 0.2, 0.6]
    with pytest.raises(UserError, match="rows of another run"):
        tune(run, steps=2)


def test_nothing_measured_is_told(run, programs):
    programs("raise SystemExit(1)")
    with pytest.raises(UserError, match="none of 1 layouts could be measured"):
        tune(run, top=1)


def test_constants_are_found_again_from_what_they_predict():
    runs = [load_recipe(name) for name in ("performance_7b_8k", "performance_7b_74k")]
    true = Calibration(matmul=0.31, attention=0.17)

    def predict(constants):
        return [estimate_step(run, Layout.of(run, 256), GPU, constants).total for run in runs]

    fitted = fit_measured(predict, predict(true))
    assert fitted.matmul == pytest.approx(true.matmul, rel=0.03)
    assert fitted.attention == pytest.approx(true.attention, rel=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tune"], "--tune needs --nproc N"),
        (["--tune", "--nproc", "2", "--gpus", "2"], "--gpus and --gpu belong to"),
        (["--tune", "--nproc", "2", "--gpu", "h"], "--gpu h is unknown"),
    ],
)
def test_mistakes_are_told_before_anything_runs(options, message, capsys):
    assert main(["--recipe", "digits_tiny", *SMALL, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_faster_of_two_on_two_ranks_trains(run_ranks, tmp_path, monkeypatch):
    """The real benchmark, whose ranks are forked."""

    def run_process(words, log, seconds):
        _, *words = words
        place = words.index("--nproc")
        _, ranks = words[place : place + 2]
        run_ranks(int(ranks), *words[:place], *words[place + 2 :], timeout=seconds)
        return 0

    monkeypatch.setattr(tuning, "_run_process", run_process)
    small = ["--recipe", "digits_tiny", *SMALL, f"train.output_dir={tmp_path / 'run'}", "--nproc", "2"]
    options = ["--tune", "--top", "2", "--tune_steps", "2", "--tune_seconds", "200", "--gpu", "h100-80gb"]
    assert main([*small, *options]) == 0
    folder = tmp_path / "run" / "tune"
    found = json.loads((folder / "rows.json").read_text())
    assert [row["outcome"] for row in found] == ["measured", "measured"], found
    fastest = min(found, key=lambda row: row["seconds"])
    assert str(Layout.of(resolve_config(config_file=folder / "best.yaml"), 2)) == fastest["layout"]
    fitted = json.loads((folder / "calibration.json").read_text())
    assert len(fitted["rows"]) == 2 and 0 < fitted["fitted"]["matmul"] < 2
    run_ranks(2, "-m", "megadit.train", "--config-file", folder / "best.yaml", "train.train_iters=2")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
