"""Files of a checkpoint follow while training goes on; a run killed meanwhile continues from the one before."""

import json
import time
from pathlib import Path

import pytest

from megadit.models.megatron.checkpoint import find_checkpoints

SLOW_WRITER = Path(__file__).parents[1] / "jobs" / "slow_writer.py"
ARGUMENTS = (
    *("--recipe", "digits_tiny", "--mock", "train.train_iters=20", "checkpoint.save_interval=5"),
    *("validation.interval=0", "logger.tensorboard=false", "parallel.data_parallel=distributed_optimizer"),
    *("optimizer.optimizer=adamw", "optimizer.lr=0.002"),
)

pytestmark = pytest.mark.slow


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def wait_until(condition, ranks):
    while not condition():
        assert all(rank.poll() is None for rank in ranks), ranks[0].communicate()[0]
        time.sleep(0.005)


def names(out):
    return [path.name for path in find_checkpoints(out / "checkpoints")]


def test_a_run_killed_while_a_checkpoint_is_written(start_ranks, run_ranks, tmp_path):
    out, whole = tmp_path / "cut", tmp_path / "whole"
    ranks = start_ranks(2, SLOW_WRITER, tmp_path, *ARGUMENTS, f"train.output_dir={out}")
    first, second = (out / "checkpoints" / f"iter_{step:07d}.unfinished" for step in (5, 10))
    wait_until(first.exists, ranks)
    wait_until(lambda: len(metrics(out)) > 6, ranks)
    assert first.exists() and not names(out), "steps are done while the first checkpoint is being written"
    (tmp_path / "1").touch()
    wait_until(second.exists, ranks)
    ranks[1].kill()
    ranks[1].wait()
    ranks[0].kill()
    ranks[0].wait()
    assert names(out) == ["iter_0000005"]

    output = run_ranks(2, "-m", "megadit.train", *ARGUMENTS, f"train.output_dir={out}")[0]
    assert "continuing from" in output and "iter_0000005" in output
    run_ranks(2, "-m", "megadit.train", *ARGUMENTS, "checkpoint.async_save=false", f"train.output_dir={whole}")
    assert names(out)[-1] == names(whole)[-1] == "iter_0000020"
    same = [[line[name] for name in ("step", "loss", "grad_norm")] for line in metrics(out)]
    assert same == [[line[name] for name in ("step", "loss", "grad_norm")] for line in metrics(whole)]
