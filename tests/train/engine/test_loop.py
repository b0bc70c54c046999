"""What a run leaves behind and how it ends. Continuing one is tested in test_resume, layouts in test_parity."""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megadit.models.flops import training_flops
from megadit.models.machine import is_out_of_memory, peak_flops
from megadit.models.megatron.checkpoint import find_checkpoints
from megadit.models.networks.dit import DiT
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.train.config.load import load_config
from megadit.train.engine.validation import lowest, lowest_so_far
from megadit.train.monitoring.metrics import Metrics
from megadit.train.recipes import load_recipe

MOCK = ("-m", "megadit.train", "--recipe", "digits_tiny", "--mock", "validation.interval=0")
LINE = re.compile(
    r"Training iteration (\d+)/5 \| lr: \S+ \| global_batch_size: 4 \| global_step: (\d+) \| "
    r"reduced_train_loss: \S+ \| train_step_timing in s: \S+ \| consumed_samples: (\d+) \| ETA: \d+ s"
)


@pytest.fixture(scope="module")
def finished(run_ranks, tmp_path_factory):
    """(folder, output) of a run of five steps of two micro-batches on each of two ranks, in bf16."""
    out = tmp_path_factory.mktemp("finished")
    more = ("data.global_batch_size=4", "train.train_iters=5", "checkpoint.save_interval=2", "checkpoint.keep_last=2")
    outputs = run_ranks(2, *MOCK, *more, "train.precision=bf16", f"train.output_dir={out}")
    return out, outputs


def test_metrics_tell_every_step(finished):
    lines = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["lr"] for line in lines[:2]] == pytest.approx([4e-3, 8e-3])
    for line in lines:
        assert 0.5 < line["loss"] < 1.5 and line["grad_norm"] > 0 and line["seconds"] > 0
        assert 0 < line["mfu"] < 1 and line["tflops"] > 0
        assert 0 < line["tokens"] <= 4 * 96
    assert lines[-1]["consumed_tokens"] == sum(line["tokens"] for line in lines)
    assert lines[-1]["consumed_samples"] == sum(line["samples"] for line in lines)


def test_the_first_rank_prints_plain_lines(finished):
    first, second = finished[1]
    assert [match[:2] for match in LINE.findall(first)] == [(str(step), str(step)) for step in range(1, 6)]
    assert not LINE.search(second)


def test_the_folder_of_a_run(finished):
    out = finished[0]
    assert [path.name for path in find_checkpoints(out / "checkpoints")] == ["iter_0000004", "iter_0000005"]
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"iter_0000004", "iter_0000005"}
    assert list((out / "tensorboard").iterdir())
    config = load_config(out / "config.yaml")
    assert config.train.precision == "bf16" and config == load_config(out / "checkpoints/iter_0000005/config.yaml")


def test_a_loss_that_is_no_number_ends_the_run(run_ranks, tmp_path):
    huge = ("optimizer.optimizer=adamw", "optimizer.lr=1e30", "optimizer.lr_warmup_iters=0")
    arguments = (*MOCK, *huge, "checkpoint.save_interval=1", f"train.output_dir={tmp_path}")
    first, second = run_ranks(2, *arguments, code=2)
    error = first.splitlines()[-1]
    assert error.startswith("error: the loss of step 2 is not a finite number; samples: mock-")
    assert "Traceback" not in first and "error" not in second
    assert [path.name for path in find_checkpoints(tmp_path / "checkpoints")] == ["iter_0000001"]


def test_a_run_that_gets_no_better_ends_and_keeps_its_best(run_ranks, tmp_path):
    """Validations at steps 1, 2 and 3, of which the first is the lowest: nothing is learnt at this rate."""
    still = ("optimizer.lr=1e-30", "ema.sigma_rels=[]", "validation.interval=1", "validation.num_batches=1")
    more = ("checkpoint.save_interval=1", "checkpoint.keep_last=1", f"train.output_dir={tmp_path / 'run'}")
    copied = f"checkpoint.copy_to={tmp_path / 'copy'}"
    command = (*MOCK[:-1], *still, *more, copied, "validation.patience=2", "train.train_iters=50")
    first, _ = run_ranks(2, *command)
    assert "done: 3 of 50 steps" in first and re.search(r"at step 1, the lowest \(validation.patience\)", first)
    for folder in (tmp_path / "run" / "checkpoints", tmp_path / "copy"):
        assert [path.name for path in find_checkpoints(folder)] == ["iter_0000001", "iter_0000003"]
    (again,) = run_ranks(1, *command)
    assert "all steps are done in" in again and "done: 3 of 50 steps, 0 of them" in again
    (longer,) = run_ranks(1, *command, "validation.patience=3")
    assert "continuing from" in longer and "done: 4 of 50 steps, 1 of them" in longer


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([3.0, 2.0, 2.0, 2.5], {"step": 2, "loss": 2.0, "since": 2}),
        ([3.0, 4.0, 2.0], {"step": 3, "loss": 2.0, "since": 0}),
        ([3.0, float("nan")], {"step": 1, "loss": 3.0, "since": 1}),
        ([float("nan"), 3.0, 4.0], {"step": 2, "loss": 3.0, "since": 1}),
    ],
)
def test_the_lowest_validation_is_remembered(losses, expected):
    found = {}
    for step, loss in enumerate(losses, start=1):
        found = lowest_so_far(found, {"step": step, "best": "none", "losses": {"none": {"mean": loss}}})
    assert found == expected


def test_what_is_no_number_is_not_the_lowest():
    means = {"none": float("nan"), "0.05": 2.0, "0.1": 1.0}
    assert lowest({name: {"mean": mean} for name, mean in means.items()}) == "0.1"


def test_too_little_memory_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value) and not is_out_of_memory(RuntimeError("connection closed by peer"))


def test_a_mistake_that_every_rank_finds_is_told_once(finished, run_ranks):
    more = ("model.num_layers=3", "train.train_iters=6", f"train.output_dir={finished[0]}")
    outputs = run_ranks(2, *MOCK, *more, code=2)
    errors = [line for output in outputs for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "was written with model.num_layers=2, which is 3 now" in errors[0]


def test_metrics_beyond_the_checkpoint_are_cut_off(tmp_path):
    run = load_recipe("digits_tiny")
    run = replace(
        run, train=replace(run.train, output_dir=str(tmp_path)), logger=replace(run.logger, tensorboard=False)
    )
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    values = {"step": 2, "loss": 1.0, "lr": 0.1, "seconds": 1.0, "consumed_samples": 3}
    with Metrics(run, start=1, length=12, enabled=True) as metrics:
        assert metrics.num_bytes == 12
        metrics.log(values)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 1} and json.loads(lines[1]) == values and len(lines) == 2


def test_flops_are_those_that_torch_counts():
    config = replace(load_recipe("digits_tiny").model, head_dim=32)
    segment = Segment((2, 4, 3), text_length=5)
    layout = PackLayout.pack([segment], capacity=24, text_capacity=5)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # so small products are torch's own, which it knows
        tokens = torch.randn(24, 1, config.patch_dim)
        text = torch.randn(5, 1, config.crossattn_emb_size)
        DiT(config).forward_packed(tokens, torch.zeros(1), text, torch.zeros(1), layout)
    assert training_flops(layout, config) == 3 * counter.get_total_flops()
    padded = PackLayout.pack([segment], capacity=96, text_capacity=64)
    assert training_flops(padded, config) == training_flops(layout, config)


def test_the_speed_of_a_device_is_measured_where_it_is_unknown():
    assert 1e8 < peak_flops(torch.device("cpu"), torch.float32) < 1e14
