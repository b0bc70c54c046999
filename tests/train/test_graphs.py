"""`parallel.cuda_graph_max_segments`: replayed blocks give the losses and gradients of blocks that are called."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megadit.models.megatron import extensions
from megadit.models.shared.errors import UserError
from megadit.train.config.rules import check_inputs
from tests.train.config.test_schema import make_run

JOB = Path(__file__).parent / "jobs" / "graphs.py"
CASES = ("all", "some", "none")
MISTAKES = ("bounds of the first pack", "segments of the first pack")


@pytest.fixture(scope="module")
def found(run_ranks, tmp_path_factory):
    """With traced operations in the place of CUDA graphs."""
    if torch.cuda.is_available():
        pytest.skip("the stand-in for CUDA graphs is for CPUs")
    [output] = run_ranks(1, JOB, tmp_path_factory.mktemp("graphs"), *CASES, *MISTAKES)
    return json.loads(output.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_the_same(found, name):
    # float32; other kernels for attention and for sums over segments, which round otherwise
    assert found[name]["apart"] < 1e-5, found[name]["which"]
    if name == "all":  # the second one is of weights that have changed
        assert found[name]["losses"] == pytest.approx(found["losses"], rel=1e-5)


@pytest.mark.slow
def test_each_block_is_recorded_once_and_replayed_for_every_pack_that_fits(found):
    assert set(found["segments"]) == {3, 4}
    assert found["all"]["recorded"] == 2 and found["all"]["replayed"] == 2 * 8 * 3  # blocks, micro-batches, steps
    assert found["some"]["recorded"] == 2 and found["some"]["replayed"] == 2 * found["segments"].count(3)
    assert (found["none"]["recorded"], found["none"]["replayed"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_what_a_recording_is_not_given_is_seen(found, name):
    assert found[name]["apart"] > 1e-2


def test_refused_without_a_gpu_or_its_kernel(monkeypatch):
    run = make_run(train={"precision": "bf16"}, parallel={"cuda_graph_max_segments": 8})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="cuda_graph_max_segments needs a GPU"):
        check_inputs(run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(extensions, "has_varlen_attention", lambda: False)
    with pytest.raises(UserError, match="torch 2.10"):
        check_inputs(run)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
def test_replayed_blocks_on_a_gpu(tmp_path):
    assert extensions.has_cuda_graphs()
    done = subprocess.run(
        [sys.executable, JOB, tmp_path, "some", *MISTAKES[1:], "all"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("some", "all"):
        assert found[name]["apart"] < 2e-2, (name, found[name]["which"])
    assert found["all"]["losses"] == pytest.approx(found["losses"], rel=1e-2)
    assert found["segments of the first pack"]["apart"] > 5e-2
