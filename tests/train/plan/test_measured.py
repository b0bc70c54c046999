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

pytestmark = pytest.mark.slow

JOB = Path(__file__).parents[1] / "jobs" / "memory.py"
SMALL_MODEL = (
    *("data.mock=true", "optimizer.optimizer=adamw", "data.seq_length=2048", "data.text_seq_length=256"),
    *("model.num_layers=4", "model.hidden_size=512", "model.num_attention_heads=8", "model.patch_spatial=2"),
    *("data.mock_latent_shapes=[[1,64,64]]", "data.global_batch_size=1"),
)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_of_a_small_model_is_within_10_percent_of_what_is_measured(precision, tmp_path):
    overrides = [*SMALL_MODEL, f"train.precision={precision}", f"train.output_dir={tmp_path}"]
    # large blocks go back to the system at once: the process's size follows its tensors
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, JOB, *overrides], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    run = resolve_config("digits_tiny", overrides=overrides)
    estimate = memory_of(run, Layout.of(run, 1))
    for part in ("parameters", "gradients", "optimizer", "averages"):
        assert getattr(estimate, part) == pytest.approx(measured[part], rel=1e-3)
    assert estimate.total == pytest.approx(measured["peak"], rel=0.1)


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
