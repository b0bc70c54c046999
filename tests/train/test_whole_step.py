"""What the host asks of a GPU and sends to it in whole optimizer steps, counted; the meta device stands for the GPU."""

import json
from pathlib import Path

import pytest
import torch

JOB = Path(__file__).parent / "jobs" / "whole_step.py"
CASES = {
    "plain": {},
    "two packs at once": {"data": {"global_batch_size": 2, "micro_batch_size": 2}},
    "blocks computed again": {"parallel": {"recompute_granularity": "full"}},
    "cosmos": {"model": {"family": "cosmos", "adaln_lora_dim": 8}},
    "moviegen": {"model": {"family": "moviegen", "position_embedding": "learned", "learned_positions": [4, 8, 8]}},
    "vp": {"model": {"preconditioner": "vp"}},
    "flow": {"model": {"preconditioner": "flow"}},
    "given": {"given": ["first_frame:0.5", "inpaint:0.3"]},
    "eight bits": {"train": {"fp8": "hybrid"}},
    "st_dit": {"model": {"family": "st_dit"}},
}
OF_A_STEP = 3
"""Sent once a step: factors of the optimizer's two groups, and counts of the batch."""
OF_A_MICRO_BATCH = dict.fromkeys(CASES, 2) | {"st_dit": 3}
"""The batch and the tensors of its layout; st_dit also sends those of both axes, and where tokens move to."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the meta device stands for a GPU where there is none"),
]


@pytest.fixture(scope="module")
def found(run_ranks, tmp_path_factory):
    [output] = run_ranks(1, JOB, tmp_path_factory.mktemp("steps"), json.dumps(CASES))
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_its_figures_alone(found, name):
    """For no copy either: all of them are of pinned memory."""
    told = found[name]
    [(line, times)] = told["asked"].items()
    assert "step.py" in line and "tolist" in line and times == told["steps"]


@pytest.mark.parametrize("name", CASES)
def test_few_copies_go_to_the_device(found, name):
    told = found[name]
    assert 0 < told["sent"] <= OF_A_MICRO_BATCH[name] * told["micro_batches"] + OF_A_STEP * told["steps"]


def test_what_is_asked_and_sent_in_vain_is_seen(found):
    """The control: steps that read their loss twice, and send a tensor of ordinary memory."""
    told = found["control"]
    assert sum(told["asked"].values()) == 3 * told["steps"] and any("copy" in line for line in told["asked"])
