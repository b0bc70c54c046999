"""A run may be killed at any moment: continued, it repeats the uninterrupted run to the last bit."""

import shutil
import signal

import pytest

from megadit.models.megatron.checkpoint import find_checkpoints

pytestmark = pytest.mark.slow

STEPS = 20
ARGUMENTS = (
    *("-m", "megadit.train", "--recipe", "digits_tiny", "--mock"),
    *(f"train.train_iters={STEPS}", "validation.interval=0", "checkpoint.save_interval=7", "logger.tensorboard=false"),
)


def arguments(out, *more):
    return (*ARGUMENTS, f"train.output_dir={out}", *more)


@pytest.fixture(scope="module", params=["muon", "adamw"])
def uninterrupted(request, run_ranks, tmp_path_factory, read_metrics):
    """(further arguments, metrics) of a run on two ranks."""
    out = tmp_path_factory.mktemp("uninterrupted")
    more = [f"optimizer.optimizer={request.param}", "optimizer.lr=0.002"]
    if request.param == "adamw":
        more.append("parallel.data_parallel=distributed_optimizer")
    run_ranks(2, *arguments(out, *more))
    return more, read_metrics(out), out


def test_a_killed_run_continues_exactly(uninterrupted, kill_in_the_middle, run_ranks, tmp_path, read_metrics, same):
    more, expected, _ = uninterrupted
    kill_in_the_middle(STEPS, tmp_path, *ARGUMENTS, *more)
    output = run_ranks(2, *arguments(tmp_path, *more))[0]
    assert "continuing from" in output
    assert same(read_metrics(tmp_path), expected)


def test_a_terminated_run_saves_and_continues_exactly(
    uninterrupted, start_until, wait_for, run_ranks, tmp_path, read_metrics, same
):
    more, expected, _ = uninterrupted
    ranks = start_until(9, 2, *arguments(tmp_path, *more))
    ranks[1].send_signal(signal.SIGTERM)  # one rank is enough: they agree
    ranks[0].send_signal(signal.SIGCONT)
    outputs = wait_for(ranks, code=128 + signal.SIGTERM)
    last = len(read_metrics(tmp_path))
    assert last < STEPS
    assert find_checkpoints(tmp_path / "checkpoints")[-1].name == f"iter_{last:07d}"
    assert f"after step {last}" in outputs[0]
    run_ranks(2, *arguments(tmp_path, *more))
    assert same(read_metrics(tmp_path), expected)


def test_another_layout_continues_the_run(uninterrupted, run_ranks, tmp_path, read_metrics):
    more, expected, finished = uninterrupted
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    newest = find_checkpoints(tmp_path / "checkpoints")[-1]
    shutil.rmtree(newest)
    start = int(find_checkpoints(tmp_path / "checkpoints")[-1].name.removeprefix("iter_"))
    layout = ["parallel.tensor_model_parallel_size=2", "parallel.data_parallel=ddp"]
    run_ranks(2, *arguments(tmp_path, *more, *layout))
    continued = read_metrics(tmp_path)
    assert [line["step"] for line in continued] == list(range(1, STEPS + 1))
    assert start < STEPS - 2, "more than one step: the first hides a wrong state of Adam"
    for line, reference in zip(continued[start:], expected[start:], strict=True):
        # float32 sums in another order, five steps apart
        assert line["loss"] == pytest.approx(reference["loss"], rel=1e-4)
        assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=5e-3)


def test_a_run_on_real_data_continues_exactly(tiny_arguments, run_ranks, tmp_path, read_metrics, same):
    """The readers' places are part of a checkpoint; reader processes make it harder."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    more = ("train.train_iters=12", "checkpoint.save_interval=5", "checkpoint.keep_last=9", "data.num_workers=1")
    run_ranks(2, *tiny_arguments, *more, "validation.interval=4", f"train.output_dir={whole}")
    shutil.copytree(whole, cut)
    for path in find_checkpoints(cut / "checkpoints")[1:]:
        shutil.rmtree(path)
    run_ranks(2, *tiny_arguments, *more, "validation.interval=4", f"train.output_dir={cut}")
    assert same(read_metrics(cut), read_metrics(whole))
