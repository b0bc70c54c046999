"""Packs of which parts are given are trained in any layout as on one rank."""

from pathlib import Path

import pytest

from .conftest import deviations, numbers, tensors_of

JOB = Path(__file__).parent / "jobs" / "layouts.py"

pytestmark = pytest.mark.slow

GIVEN = {"conditioning": ["first_frame:0.3", "last_frame:0.2", "prefix:0.1", "inpaint:0.3", "edit:1.0"]}
EXPERTS = {"model": {"experts": {"num_experts": 4, "ffn_hidden_size": 24}}}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CP = {"context_parallel_size": 2}
AUGMENTED = {"model": {"conditioning_mode": "augmented"}}
MARKED = {"family": "cosmos", "adaln_lora_dim": 4, "padding_mask_channel": True, "conditioning_mode": "marked"}
FLOW = {"parameterization": "flow"}
ONE_RANK = {
    "plain": GIVEN,
    "experts": GIVEN | EXPERTS,
    "axial": GIVEN | {"model": {"family": "st_dit"}},
    "augmented": GIVEN | AUGMENTED,
    "predict2": GIVEN | {"model": MARKED | FLOW},
    "predict2_5": GIVEN | {"model": MARKED | FLOW | {"compat": "predict2_5"}},
    "wan": GIVEN | {"model": {"family": "wan"} | FLOW},
}
LAYOUTS = {
    "plain sp": SP,
    "plain ring": {**CP, "context_parallel_comm": "ring"},
    "plain pp": {"pipeline_model_parallel_size": 2},
    "plain fsdp, recomputed": {"data_parallel": "fsdp", "recompute_granularity": "full"},
    "experts ep": {"expert_model_parallel_size": 2},
    "axial cp": CP,
    "augmented sp": SP,
    "augmented fsdp": {"data_parallel": "fsdp"},
    "predict2 sp": SP,
    "predict2_5 fsdp": {"data_parallel": "fsdp"},
    "wan cp": CP,
    "wan pp": {"pipeline_model_parallel_size": 2},
}
"""The first word is that of the counterpart on one rank."""
BROKEN = ("no loss on what is given", "a noise level of its own")


@pytest.fixture(scope="module")
def folder(folders_of):
    two = {name: {**ONE_RANK[name.split()[0]], "parallel": parallel} for name, parallel in LAYOUTS.items()}
    two |= {f"without {what}": {**GIVEN, "parallel": SP, "broken": what} for what in BROKEN}
    return folders_of({1: ONE_RANK, 2: two}.__getitem__, JOB, timeout=560)


def deviations_of(ours, one):
    """As `deviations`, and of what is sampled."""
    sampled = max(abs(x - y) for x, y in zip(ours["sampled"], one["sampled"], strict=True))
    return deviations(ours, one) | {"sampled": sampled / max(map(abs, one["sampled"])) / 1e-4}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_and_samples_as_one_rank_does(folder, name):
    ours, one = numbers(folder(2), name), numbers(folder(1), name.split()[0])
    assert max(deviations_of(ours, one).values()) < 1, deviations_of(ours, one)
    assert ours["tokens"] == one["tokens"]
    expected = tensors_of(folder(1) / name.split()[0], "model.")
    found = tensors_of(folder(2) / name, "model.")
    assert all((found[key] - expected[key]).norm() <= 1e-5 * expected[key].norm() for key in expected)


@pytest.mark.parametrize("what", BROKEN)
def test_what_holds_it_together_is_needed(folder, what):
    broken, one = numbers(folder(2), f"without {what}"), numbers(folder(1), "plain")
    assert deviations(broken, one)["loss"] > 100
