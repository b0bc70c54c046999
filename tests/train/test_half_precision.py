"""Training in fp16: an overflow leaves a step out and lowers the loss scale, which checkpoints keep."""

import json

import pytest
import torch

from megadit.models.megatron.checkpoint import find_checkpoints, read_network

pytestmark = pytest.mark.slow

HALF = (
    *("-m", "megadit.train", "--recipe", "digits_tiny", "--mock", "train.precision=fp16", "validation.interval=0"),
    *("optimizer.optimizer=adamw", "optimizer.lr=0.002", "logger.tensorboard=false"),
)
LAYOUTS = {
    "distributed optimizer": ("parallel.data_parallel=distributed_optimizer",),
    "stages": ("parallel.pipeline_model_parallel_size=2",),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_leaves_the_step_out_and_lowers_the_scale(run_ranks, tmp_path, read_metrics, layout):
    scale = ("train.loss_scale=131072", "train.train_iters=9", "train.loss_scale_window=3")
    kept = ("checkpoint.save_interval=1", "checkpoint.keep_last=9")
    output = run_ranks(2, *HALF, *scale, *kept, *LAYOUTS[layout], f"train.output_dir={tmp_path}")[0]
    assert "overflows with a loss scale of 131072: update skipped" in output
    metrics = read_metrics(tmp_path)
    left_out = {event["step"] for event in map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())}
    assert 1 in left_out and 1 < len(left_out) < 7
    weights = [read_network(path, ema=None) for path in find_checkpoints(tmp_path / "checkpoints")]
    before, since = 2.0**17, 0
    for line, (old, new) in zip(metrics[1:], zip(weights, weights[1:], strict=False), strict=True):
        is_left_out = line["step"] in left_out
        assert is_left_out == all(torch.equal(old[name], new[name]) for name in old)
        assert is_left_out == (line["grad_norm"] is None)
    for line in metrics:
        since = 0 if line["step"] in left_out else since + 1
        expected = before / 2 if line["step"] in left_out else before * (2 if since == 3 else 1)
        assert line["loss_scale"] == expected
        before, since = expected, since % 3


def test_it_learns_as_bf16_does(run_ranks, tmp_path, read_metrics):
    losses, without_overflow = {}, "train.loss_scale=1024"
    for precision in ("fp32", "bf16", "fp16"):
        out = tmp_path / precision
        settings = (f"train.precision={precision}", without_overflow, "train.train_iters=8")
        run_ranks(2, *HALF, *settings, f"train.output_dir={out}")
        losses[precision] = [line["loss"] for line in read_metrics(out)]
    apart = {name: max(abs(a / b - 1) for a, b in zip(losses[name], losses["fp32"], strict=True)) for name in losses}
    assert apart["fp16"] < apart["bf16"] < 0.05, apart  # ten bits of mantissa, and seven


def test_a_killed_run_continues_exactly(kill_in_the_middle, run_ranks, tmp_path, read_metrics, same):
    """The scale goes down and up on the way."""
    settings = ("train.train_iters=24", "checkpoint.save_interval=7", "train.loss_scale_window=5")
    command = (*HALF, *settings, "train.loss_scale=131072", *LAYOUTS["distributed optimizer"])
    run_ranks(2, *command, f"train.output_dir={tmp_path / 'whole'}")
    kill_in_the_middle(24, tmp_path / "cut", *command)
    assert "continuing from" in run_ranks(2, *command, f"train.output_dir={tmp_path / 'cut'}")[0]
    whole, cut = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "cut")
    assert same(cut, whole)
    scales = [line["loss_scale"] for line in whole]
    assert [line["loss_scale"] for line in cut] == scales and len(set(scales)) > 2


def test_a_window_that_was_shortened_ends(run_ranks, tmp_path, read_metrics):
    """After six steps without an overflow, of a run that goes on with a window of four, the next one ends it."""
    command = (*HALF, "train.loss_scale=1024", "checkpoint.save_interval=6", f"train.output_dir={tmp_path}")
    run_ranks(1, *command, "train.train_iters=6", "train.loss_scale_window=100")
    run_ranks(1, *command, "train.train_iters=12", "train.loss_scale_window=4")
    scales = [line["loss_scale"] for line in read_metrics(tmp_path)]
    assert scales == [1024] * 6 + [2048] * 4 + [4096] * 2
