"""The newest Megatron-core that this package takes trains as the installed one does, and either continues the other.

Python 3.11 is no longer among those for which newer wheels are meant, and runs them: unpacked into a folder that goes
first, with Triton's language, which they import.
"""

import json
import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megadit.infer.inspect.doctor import TESTED
from megadit.models.megatron.checkpoint import _read, find_checkpoints

JOB = Path(__file__).parent / "jobs" / "chain.py"
OLDEST, NEWEST = TESTED["megatron-core"]
TURN = 2
"""Steps of each version before the other goes on: more than one, as the first hides a wrong state of Adam."""
STEPS = 3 * TURN

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(metadata.version("megatron-core") != OLDEST, reason=f"compares with Megatron-core {OLDEST}"),
]

FEW = {"data": {"global_batch_size": 2}}
DEEP = {"num_layers": 4}
EXPERTS = {"experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}}
CASES = {
    "tp, sp, muon": {
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "optimizer": {"optimizer": "muon"},
    },
    "cp, fsdp": {"parallel": {"context_parallel_size": 2, "data_parallel": "fsdp"}},
    "ring": {"parallel": {"context_parallel_size": 2, "context_parallel_comm": "ring"}},
    "vpp, recomputed": {
        "model": DEEP,
        "parallel": {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "recompute_granularity": "full",
        },
    },
    "ep, distributed optimizer": {
        "model": EXPERTS,
        "parallel": {"expert_model_parallel_size": 2, "data_parallel": "distributed_optimizer"},
    },
}
"""On two ranks; between them all that asks Megatron for something of its own."""


@pytest.fixture(scope="module")
def newest(tmp_path_factory):
    """A folder that holds the newest Megatron-core, and where none is installed Triton's language, 1 GB."""
    folder = tmp_path_factory.mktemp("newest")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"]
    command += ["--ignore-requires-python", "--target", str(folder), f"megatron-core=={NEWEST}"]
    command += [] if find_spec("triton") else ["triton"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"Megatron-core {NEWEST} cannot be had: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture(scope="module")
def runs(newest, run_ranks, tmp_path_factory):
    """A folder of runs: one/CASE by the installed version alone, turns/CASE by it, the newest, and it again."""
    out = tmp_path_factory.mktemp("runs")
    path = os.pathsep.join(filter(None, (str(newest), os.environ.get("PYTHONPATH"))))
    environments = {OLDEST: None, NEWEST: {"PYTHONPATH": path}}

    def run(version, parts):
        (out / "runs.json").write_text(json.dumps(parts))
        told = run_ranks(2, JOB, out, timeout=560, environment=environments[version])
        assert all(f"Megatron-core {version}" in one for one in told)

    run(OLDEST, [*until(STEPS, "one"), *until(TURN, "turns")])
    run(NEWEST, until(2 * TURN, "turns"))
    run(OLDEST, until(STEPS, "turns"))
    return out


def until(step, folder):
    return [{"folder": f"{folder}/{name}", "iters": step, "case": FEW | case} for name, case in CASES.items()]


def tensors(folder):
    """All that training changes."""
    return _read(find_checkpoints(folder / "checkpoints")[-1] / "tensors", "")


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", CASES)
def test_either_version_trains_as_the_other_and_continues_it(runs, name):
    one, turns = runs / "one" / name, runs / "turns" / name
    assert len(losses(one)) == STEPS
    assert losses(turns) == pytest.approx(losses(one), rel=1e-6)
    torch.testing.assert_close(tensors(turns), tensors(one), rtol=1e-6, atol=1e-7)
