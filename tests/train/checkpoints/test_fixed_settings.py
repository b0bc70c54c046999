"""A run that cannot go on as it is asked to is refused, and what it has is left as it was."""

import json
import shutil

import pytest

from megadit.models.megatron.checkpoint import find_checkpoints
from megadit.train.__main__ import main
from megadit.train.checkpoints.fixed_settings import FIXED_SETTINGS, fixed_settings
from megadit.train.config.load import resolve_config, to_yaml

RUN = ("--recipe", "digits_tiny", "--mock", "train.train_iters=4")
CHANGES = {
    "model": "model.num_layers=3",
    "optimizer.optimizer": "optimizer.optimizer=adamw",
    "diffusion.learned_uncertainty": "diffusion.learned_uncertainty=false",
    "ema.sigma_rels": "ema.sigma_rels=[0.2]",
    "train.seed": "train.seed=7",
}
"""Kept setting -> a change of it that is refused for nothing else."""
OTHERS = {"train.adapter", "train.distill", "data.mock"}
"""Whose change needs weights, a teacher or a data set beside it."""


def tree(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a run leaves, as far as it is read before anything is built."""
    tmp_path = tmp_path_factory.mktemp("kept")
    config = resolve_config("digits_tiny", overrides=["data.mock=true", "train.train_iters=4"])
    state = {"run": {"iteration": 2}, "ema_sigma_rels": [], "settings": fixed_settings(config)}
    (tmp_path / "run/checkpoints/iter_0000002").mkdir(parents=True)
    (tmp_path / "run/checkpoints/iter_0000002/state.json").write_text(json.dumps(state))
    (tmp_path / "run/config.yaml").write_text(to_yaml(config))
    return tmp_path / "run"


def test_every_kept_setting_has_a_change():
    assert CHANGES.keys() | OTHERS == {*FIXED_SETTINGS}


@pytest.mark.parametrize(
    ("place", "changed"), [*(("train.output_dir", changed) for changed in CHANGES), ("checkpoint.load", "train.seed")]
)
def test_a_changed_setting_is_refused_before_anything_is_written(run, capsys, changed, place):
    out = [f"{place}={run}", *([f"train.output_dir={run}_2"] if place == "checkpoint.load" else [])]
    before = tree(run.parent)
    assert main([*RUN, *out, CHANGES[changed]]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"was written with {changed}" in error and "set it back" in error
    assert tree(run.parent) == before


def test_a_damaged_checkpoint_is_passed_over(run, tmp_path, capsys):
    run = shutil.copytree(run, tmp_path / "run")
    shutil.copytree(run / "checkpoints/iter_0000002", run / "checkpoints/iter_0000004")
    (run / "checkpoints/iter_0000004/state.json").write_text("{")
    assert main([*RUN, f"train.output_dir={run}", CHANGES["train.seed"]]) == 2
    assert "iter_0000002 was written with train.seed" in capsys.readouterr().err


@pytest.mark.slow
def test_what_the_reader_refuses_leaves_the_run_as_it_was(tiny_arguments, run_ranks, tmp_path):
    run_ranks(1, *tiny_arguments, f"train.output_dir={tmp_path}", "train.train_iters=2", "validation.interval=0")
    before = tree(tmp_path)
    assert find_checkpoints(tmp_path / "checkpoints")
    outputs = run_ranks(1, *tiny_arguments, f"train.output_dir={tmp_path}", "data.shuffle_buffer_size=7", code=2)
    assert "cannot resume the data reader" in outputs[0]
    assert tree(tmp_path) == before


WITHOUT_MEMORY = """
import sys
from megadit.models import machine
machine.host_memory = lambda: 1 << 20
from megadit.{} import main
raise SystemExit(main(sys.argv[1:]))
"""


def test_a_run_that_cannot_fit_is_refused_before_anything_is_written(run_ranks, tmp_path):
    out, program = tmp_path / "out", WITHOUT_MEMORY.format("train.__main__")
    command = ["-c", program, *RUN, "train.train_iters=1", "validation.interval=0", f"train.output_dir={out}"]
    outputs = run_ranks(2, *command, code=2)
    errors = [line for output in outputs for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and " of memory, and 0.5 MiB are free: " in errors[0]
    assert "--even_if_too_large starts it anyway" in errors[0]
    assert [path for path in out.rglob("*") if path.name != "watchdog"] == []
    assert "done: 1 of 1 steps" in run_ranks(1, *command, "--even_if_too_large")[0]


def test_steps_that_cannot_fit_are_not_measured(run_ranks, tmp_path):
    program = WITHOUT_MEMORY.format("train.benchmarks.train")
    command = ["-c", program, "--recipe", "digits_tiny", "--steps", "1", "--warmup", "0"]
    assert "error: a rank of digits_tiny needs about" in run_ranks(1, *command, code=2)[0]
    assert "tokens/s" in run_ranks(1, *command, "--even_if_too_large")[0]
