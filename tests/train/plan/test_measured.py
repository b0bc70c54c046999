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
    *("model.num_layers=4", "model.hidden_size=512", "model.num_attention_heads=8", "model.patch_spatial=2"),
    *("data.mock_latent_shapes=[[1,64,64]]", "data.global_batch_size=1"),
)


@pytest.fixture
def measure(tmp_path):
    """measure(a.b=c, ...): (what a step of a small model holds, what the planner says)."""
    return lambda *overrides: _measure([*SMALL_MODEL, *overrides, f"train.output_dir={tmp_path}"])


def _measure(overrides):
    # large blocks go back to the system at once: the process's size follows its tensors
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, JOB, *overrides], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run = resolve_config("digits_tiny", overrides=overrides)
    return json.loads(done.stdout.splitlines()[-1]), memory_of(run, Layout.of(run, 1))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_of_a_small_model_is_within_10_percent_of_what_is_measured(measure, precision):
    measured, estimate = measure(f"train.precision={precision}")
    for part in ("parameters", "gradients", "optimizer", "ema_weights"):
        assert getattr(estimate, part) == pytest.approx(measured[part], rel=1e-3)
    assert estimate.total == pytest.approx(measured["peak"], rel=0.1)


def test_memory_of_an_adapter_is_within_5_percent_of_what_is_measured(measure):
    """But for some 40 MB that the process keeps, whatever is trained."""
    measured, estimate = measure("train.precision=fp32", "train.adapter.rank=8")
    for part in ("parameters", "gradients", "optimizer", "ema_weights"):
        assert getattr(estimate, part) == pytest.approx(measured[part], rel=1e-3)
    of_step = estimate.activations + estimate.passing
    assert of_step == pytest.approx(measured["peak"] - measured["resting"], rel=0.05)
    assert measured["optimizer"] == 2 * measured["gradients"] < 0.04 * measured["parameters"]


def test_a_base_in_eight_bits_is_as_small_as_planned(measure):
    adapter = ("train.precision=bf16", "train.adapter.rank=8", "model.num_layers=2")
    measured, estimate = measure(*adapter, "train.base_precision=int8")
    whole, planned = measure(*adapter)
    assert estimate.parameters == pytest.approx(measured["parameters"], rel=5e-3)  # steps of rows are not planned
    saved = whole["parameters"] - measured["parameters"]
    assert planned.parameters - estimate.parameters == pytest.approx(saved, rel=0.01)
    assert estimate.activations + estimate.passing == pytest.approx(measured["peak"] - measured["resting"], rel=0.1)


@pytest.fixture
def student(tmp_path):
    """Overrides of a run with a teacher and a critic."""
    shape = {"num_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "patch_spatial": 2}
    teacher = write(tmp_path / "teacher", 0, **shape)
    return (
        *("train.precision=fp32", "model.in_channels=24", "model.crossattn_emb_size=64", "model.num_layers=2"),
        *(f"train.distill.teacher={teacher}", "train.distill.objective=distribution_matching"),
        *("train.distill.sigmas=[20]", "train.distill.critic_updates=1", "diffusion.learned_uncertainty=false"),
        "train.distill.adversarial_weight=0.1",
    )


def test_memory_of_a_student_with_its_teacher_and_critic_is_what_is_measured(measure, student):
    measured, estimate = measure(*student)
    for part in ("parameters", "gradients", "optimizer", "ema_weights"):
        assert getattr(estimate, part) == pytest.approx(measured[part], rel=1e-3)
    assert measured["gradients"] == pytest.approx(2 / 3 * measured["parameters"], rel=3e-3), "of two of three networks"
    assert estimate.total == pytest.approx(measured["peak"], rel=0.1)


def test_three_networks_have_the_memory_of_one_as_planned(measure, student):
    """As adapters beside one set of weights: what two adapters and the steps of their training take, and no more."""
    measured, estimate = measure(*student, "train.adapter.rank=8")
    for part in ("parameters", "gradients", "optimizer", "ema_weights"):
        assert getattr(estimate, part) == pytest.approx(measured[part], rel=1e-3)
    of_adapters = measured["gradients"]  # float32, as these are
    one = count_parameters(resolve_config("digits_tiny", overrides=[*SMALL_MODEL, *student]).model).total
    assert measured["parameters"] - of_adapters == pytest.approx(4 * one, rel=1e-3)
    of_step = estimate.activations + estimate.passing  # without what is made for the critic
    assert of_step == pytest.approx(measured["peak"] - measured["resting"], rel=0.15)


def test_groups_are_megatron_s():
    script = """
from megadit.models.megatron import cpu_shim
cpu_shim.install()
from megatron.core.parallel_state import RankGenerator
import json
generator = RankGenerator(tp=2, ep=1, dp=4, pp=2, cp=3, order="tp-cp-ep-dp-pp")
print(json.dumps({name: generator.get_ranks(name) for name in ("tp", "cp", "dp", "pp")}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = Layout(gpus=48, tensor=2, context=3, pipeline=2, global_batch_size=4).groups()
    for name, theirs_name in {"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp"}.items():
        assert sorted(ours[name].tolist()) == sorted(theirs[theirs_name])
