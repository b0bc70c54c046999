"""The planner's memory and groups beside the real ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megadit.train.config.load import resolve_config
from megadit.train.plan.layout import Layout
from megadit.train.plan.memory import memory_of
from megadit.train.plan.work import count_parameters
from tests.train.test_adapter_runs import write

pytestmark = pytest.mark.slow

JOB = Path(__file__).parents[1] / "jobs" / "memory.py"
SMALL_MODEL = (
    *("data.mock=true", "optimizer.optimizer=adamw", "data.seq_length=2048", "data.text_seq_length=256"),
    *("model.num_layers=2", "model.hidden_size=512", "model.num_attention_heads=8", "model.patch_spatial=2"),
    *("data.mock_latent_shapes=[[1,64,64]]", "data.global_batch_size=1", "train.precision=fp32"),
)
ADAPTER = ("train.adapter.rank=8",)
STUDENT = (
    *("data.seq_length=1024", "model.in_channels=24", "model.crossattn_emb_size=64"),
    *("train.distill.teacher={teacher}", "train.distill.objective=distribution_matching"),
    *("train.distill.sigmas=[20]", "train.distill.critic_updates=1", "diffusion.learned_uncertainty=false"),
    "train.distill.adversarial_weight=0.1",
)
RUNS = {
    "fp32": (),
    "bf16": ("train.precision=bf16",),
    "adapter": ADAPTER,
    "adapter, bf16": (*ADAPTER, "train.precision=bf16"),
    "adapter, int8": (*ADAPTER, "train.precision=bf16", "train.base_precision=int8"),
    "student": STUDENT,
    "student as adapters": (*STUDENT, *ADAPTER),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Name -> overrides."""
    folder = tmp_path_factory.mktemp("memory")
    shape = {"num_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "patch_spatial": 2}
    teacher = write(folder / "teacher", 0, **shape)
    return {
        name: [*SMALL_MODEL, *(word.format(teacher=teacher) for word in words), f"train.output_dir={folder}"]
        for name, words in RUNS.items()
    }


@pytest.fixture(scope="module")
def measured(runs):
    """Name -> (what a step holds, what the planner says)."""
    # large blocks go back to the system at once: the process's size follows its tensors
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, JOB, json.dumps(runs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr[-3000:]
    told = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            told |= json.loads(line)
    resolved = {name: resolve_config("digits_tiny", overrides=overrides) for name, overrides in runs.items()}
    return {name: (told[name], memory_of(run, Layout.of(run, 1))) for name, run in resolved.items()}


def is_as_planned(measured, estimate):
    """Whether all that is held between steps has the size that the planner says."""
    parts = ("parameters", "gradients", "optimizer", "ema_weights")
    return all(getattr(estimate, part) == pytest.approx(measured[part], rel=1e-3) for part in parts)


@pytest.mark.parametrize("name", ["fp32", "bf16", "student"])
def test_memory_of_a_small_model_is_within_10_percent_of_what_is_measured(measured, name):
    """The student's with its teacher and its critic."""
    found, estimate = measured[name]
    assert is_as_planned(found, estimate)
    assert estimate.total == pytest.approx(found["peak"], rel=0.1)


def test_a_teacher_has_no_gradients(measured):
    found, _ = measured["student"]
    assert found["gradients"] == pytest.approx(2 / 3 * found["parameters"], rel=3e-3), "of two of three networks"


def test_memory_of_an_adapter_is_within_10_percent_of_what_is_measured(measured):
    """But for some 40 MB that the process keeps, whatever is trained."""
    found, estimate = measured["adapter"]
    assert is_as_planned(found, estimate)
    assert estimate.activations + estimate.passing == pytest.approx(found["peak"] - found["resting"], rel=0.1)
    assert found["optimizer"] == 2 * found["gradients"] < 0.07 * found["parameters"]


def test_a_base_in_eight_bits_is_as_small_as_planned(measured):
    (whole, planned), (found, estimate) = measured["adapter, bf16"], measured["adapter, int8"]
    assert estimate.parameters == pytest.approx(found["parameters"], rel=5e-3)  # steps of rows are not planned
    saved = whole["parameters"] - found["parameters"]
    assert planned.parameters - estimate.parameters == pytest.approx(saved, rel=0.01)
    # processors without products in bf16 take more beside the tensors (15 MB with AVX-512)
    assert estimate.activations + estimate.passing == pytest.approx(found["peak"] - found["resting"], rel=0.2)


def test_three_networks_have_the_memory_of_one_as_planned(measured, runs):
    """As adapters beside one set of weights: what two adapters and the steps of their training take, and no more."""
    found, estimate = measured["student as adapters"]
    assert is_as_planned(found, estimate)
    of_adapters = found["gradients"]  # float32, as these are
    one = count_parameters(resolve_config("digits_tiny", overrides=runs["student"]).model).total
    assert found["parameters"] - of_adapters == pytest.approx(4 * one, rel=1e-3)
    of_step = estimate.activations + estimate.passing  # without what is made for the critic
    assert of_step == pytest.approx(found["peak"] - found["resting"], rel=0.15)


GROUPS = """
from megatron.core.parallel_state import RankGenerator
import json
generator = RankGenerator(tp=2, ep=1, dp=4, pp=2, cp=3, order="tp-cp-ep-dp-pp")
print(json.dumps({name: generator.get_ranks(name) for name in ("tp", "cp", "dp", "pp")}))
"""


def test_groups_are_megatron_s(run_ranks):
    (told,) = run_ranks(1, "-c", GROUPS)
    theirs = json.loads(told.splitlines()[-1])
    ours = Layout(gpus=48, tensor=2, context=3, pipeline=2, global_batch_size=4).groups()
    for name, theirs_name in {"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp"}.items():
        assert sorted(ours[name].tolist()) == sorted(theirs[theirs_name])
