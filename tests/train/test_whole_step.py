"""What the host asks of a GPU and sends to it in whole optimizer steps, counted; the meta device stands for the GPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megadit.train.recipes import load_recipe

from .distill.test_layouts import CHANNELS, OBJECTIVES, write
from .objectives.test_contrast import CLIP, LOSSES
from .test_vit_layouts import SP, VIT

JOB = Path(__file__).parent / "jobs" / "whole_step.py"
CP = {"context_parallel_size": 2}
DISTRIBUTED = {"data_parallel": "distributed_optimizer"}
CASES = {
    1: {
        "plain": {"data": {"global_batch_size": 2}},
        "float32 moments": {"optimizer": {}},
        "muon": {"precision": "fp32", "optimizer": {"optimizer": "muon"}},
        "two packs at once": {"data": {"global_batch_size": 2, "micro_batch_size": 2}},
        "blocks computed again": {"parallel": {"recompute_granularity": "full"}},
        "cosmos": {"model": {"family": "cosmos", "adaln_lora_dim": 8}},
        "flow": {"model": {"parameterization": "flow"}},
        "levels by size": {"diffusion": {"shift_tokens": 1024}},
        "conditioning": {"conditioning": ["first_frame:0.5", "inpaint:0.3"]},
        "eight bits": {"train": {"fp8": "hybrid"}},
        "vit": VIT,
        "siglip": LOSSES["siglip"],
    },
    2: {
        "tensor parallel": {"parallel": SP},
        "heads exchanged": {"parallel": CP},
        "ring": {"parallel": CP | {"context_parallel_comm": "ring"}},
        "st_dit, two ranks": {"model": {"family": "st_dit"}, "parallel": CP},
        "distributed optimizer, float32 moments": {"parallel": DISTRIBUTED, "optimizer": {}},
        "clip, two readers": CLIP,
    },
}
"""On so many ranks."""
DISTILLED = {f"distilled, {objective}": objective for objective in OBJECTIVES}
NAMES = [*CASES[1], *DISTILLED, *CASES[2]]
OF_AN_UPDATE = 3
"""Copies: factors of the optimizer's two groups, and counts of the batch. A critic is updated beside its student."""
OF_A_MICRO_BATCH = 1
"""The batch, and all that is read of its layout."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the meta device stands for a GPU where there is none"),
]


def cases_of(ranks, folder):
    if ranks > 1:
        return CASES[ranks]
    shape = {"num_layers": 2, "num_attention_heads": 12, "head_dim": 8, "in_channels": CHANNELS}
    teacher = str(write(folder / "teacher", replace(load_recipe("digits_tiny").model, **shape), 0))
    student = {"init_from": teacher, "model": {"in_channels": CHANNELS}}
    distilled = {
        name: student | {"distill": {**OBJECTIVES[objective], "teacher": teacher, "critic_updates": 1}}
        for name, objective in DISTILLED.items()
    }
    return CASES[1] | distilled | {"control": {"is_control": True}}


@pytest.fixture(scope="module")
def found(run_ranks, tmp_path_factory):
    folder, told = tmp_path_factory.mktemp("steps"), {}
    for ranks in CASES:
        outputs = run_ranks(ranks, JOB, folder, json.dumps(cases_of(ranks, folder)), timeout=500)
        told |= json.loads(outputs[0].splitlines()[-1])
    return told


@pytest.mark.parametrize("name", NAMES)
def test_a_step_waits_for_its_figures_alone(found, name):
    """For no copy either: all of them are of pinned memory."""
    told = found[name]
    [(line, times)] = told["asked"].items()
    assert "step.py" in line and "tolist" in line and times == told["updates"]


@pytest.mark.parametrize("name", NAMES)
def test_few_copies_go_to_the_device(found, name):
    told = found[name]
    most = OF_A_MICRO_BATCH * told["micro_batches"] + OF_AN_UPDATE * told["updates"]
    assert 0 < sum(told["sent"].values()) <= most, told["sent"]


def test_what_is_asked_and_sent_in_vain_is_seen(found):
    """The control: a step that reads its loss twice, sends a tensor of ordinary memory, and numbers."""
    told = found["control"]
    assert sum(told["asked"].values()) == 4 and sum("copy" in line for line in told["asked"]) == 2
