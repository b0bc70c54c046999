"""The update of a GPU gives what Megatron's gives, in every layout, and asks the device for nothing."""

import json
from pathlib import Path

import pytest

JOB = Path(__file__).parents[1] / "jobs" / "device_update.py"
PASSES = {"optimizer": {"moments": "bf16"}}
MUON = {"optimizer": {"optimizer": "muon"}}
TP = {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}
DISTRIBUTED = {"precision": "bf16", "parallel": {"data_parallel": "distributed_optimizer"}}
FSDP = {"parallel": {"data_parallel": "fsdp"}}
EXPERTS = {"model": {"experts": {"num_experts": 2}}, "parallel": {"expert_model_parallel_size": 2}}
FOLDED = {
    "two copies": PASSES,
    "distributed optimizer, bf16": PASSES | DISTRIBUTED,
    "two halves of each matrix": PASSES | TP,
    "two stages": PASSES | {"parallel": {"pipeline_model_parallel_size": 2}},
    "experts": PASSES | EXPERTS,
    "fully sharded": PASSES | FSDP,
    "not clipped": {"optimizer": {"moments": "bf16", "clip_grad": 0.0}},
}
"""AdamW with moments in halves, which multiplies the gradients itself."""
SAME = {
    "float32 moments, distributed optimizer, bf16": DISTRIBUTED,
    "float32 moments, two halves of each matrix": TP,
    "float32 moments, experts": EXPERTS,
    "float32 moments, fully sharded": FSDP,
    "float32 moments, not clipped": {"optimizer": {"clip_grad": 0.0}},
    "muon, two halves of each matrix": MUON | TP,
}
"""Others, for which Megatron's functions do."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(run_ranks, tmp_path_factory):
    """On two ranks; of each rank."""
    outputs = run_ranks(2, JOB, tmp_path_factory.mktemp("update"), json.dumps(FOLDED | SAME), timeout=500)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.parametrize("name", FOLDED)
def test_weights_losses_and_norms_are_the_same(found, name):
    # the same products, rounded in another order: a moment is rounded at random, and sometimes to the other side
    weights, numbers = (4e-3, 1e-2) if "bf16" in name else (1e-3, 1e-3)
    for of_rank in found:
        told = of_rank[name]
        assert told["apart"][0] < weights, told["apart"]
        assert told["losses"][1] == pytest.approx(told["losses"][0], rel=numbers)
        assert told["norms"][1] == pytest.approx(told["norms"][0], rel=numbers)
        assert told["norms"][1][0] == pytest.approx(told["norms"][0][0], rel=1e-5), "before any update"
        assert told["checksums"]


@pytest.mark.parametrize("name", FOLDED | SAME)
def test_statistics_are_of_the_gradients_that_the_optimizer_used(found, name):
    for of_rank in found:
        plain, ours = of_rank[name]["gradients"]
        assert ours == pytest.approx(plain, rel=1e-4, abs=1e-9) and max(plain) > 0


@pytest.mark.parametrize("name", SAME)
def test_megatrons_weights_and_losses_are_the_same_to_the_bit_and_norms_as_roots_are(found, name):
    for of_rank in found:
        told = of_rank[name]
        assert told["apart"][0] == 0, told["apart"]
        assert told["losses"][1] == told["losses"][0]
        # Megatron takes the last root by `** 0.5`, which some processors' libm rounds to a neighbour in float64
        assert told["norms"][1] == pytest.approx(told["norms"][0], rel=4e-16, abs=0)
        assert min(told["norms"][0]) > 0.5, "all of these gradients are clipped, where any are"


def test_the_host_asks_for_nothing(found):
    assert all(told["asked"] == 0 for of_rank in found for told in of_rank.values())


def test_a_wrong_norm_is_seen(run_ranks, tmp_path):
    """The control: clipping by it, weights end elsewhere."""
    [output] = run_ranks(1, JOB, tmp_path, json.dumps({"one": PASSES}), "1.1")
    told = json.loads(output.splitlines()[-1])["one"]
    assert told["norms"][1][0] == pytest.approx(1.1 * told["norms"][0][0], rel=1e-4)
