"""A classifier trains alike under every layout that it may have; the job and the comparison are those of the DiT."""

from pathlib import Path

import pytest
import safetensors.torch

from .conftest import deviations, distance, numbers, tensors_of

JOB = Path(__file__).parent / "jobs" / "layouts.py"

pytestmark = pytest.mark.slow

VIT = {
    "model": {
        "family": "vit",
        "position_embedding": "learned",
        "learned_positions": [1, 3, 5],
        "qk_layernorm": False,
        "num_classes": 300,
        "crossattn_emb_size": 2,
        "in_channels": 3,
        "patch_spatial": 2,
    },
    "data": {"mock_latent_shapes": [[1, 6, 10]], "text_dropout": 0.0, "mixup": 0.5},
    "train": {"label_smoothing": 0.1},
}
TP = {"tensor_model_parallel_size": 2}
SP = TP | {"sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
FSDP = {"data_parallel": "fsdp"}
LAYOUTS = {
    2: {
        "dp": {},
        "distributed optimizer": {"data_parallel": "distributed_optimizer"},
        "tp": TP,
        "sp": SP,
        "pp": PP,
        "fsdp": FSDP,
    },
    4: {"sp + pp": SP | PP, "sp + fsdp": SP | FSDP},
}
CASES = [(ranks, name) for ranks, layouts in LAYOUTS.items() for name in layouts]


def cases(ranks):
    if ranks == 1:
        return {"torch": VIT | {"is_torch": True}, "one": VIT | {"gradients": True}}
    broken = {"without marks": VIT | {"parallel": SP, "broken": "sequence parallel mark"}} if ranks == 2 else {}
    return {name: VIT | {"parallel": parallel} for name, parallel in LAYOUTS[ranks].items()} | broken


@pytest.fixture(scope="module")
def folders(folders_of):
    return folders_of(cases, JOB, timeout=300)


def test_megatron_on_one_rank_is_torch(folders):
    by_torch, by_megatron = (
        safetensors.torch.load_file(folders(1) / name / "gradients.safetensors") for name in ("torch", "one")
    )
    for name, gradient in by_torch.items():
        assert gradient.norm() > 0, f"{name} has no gradient"
    # the same operations; Megatron adds gradients of micro-batches into a buffer and divides afterwards
    assert distance(by_megatron, by_torch) < 1e-5


@pytest.mark.parametrize(("ranks", "layout"), CASES)
def test_a_layout_trains_as_one_rank_does(folders, ranks, layout):
    found = deviations(numbers(folders(ranks), layout), numbers(folders(1), "one"))
    assert max(found.values()) < 1, found
    names = (folders(ranks) / layout, folders(1) / "one")
    assert distance(*(tensors_of(name, "model.") for name in names)) < 2e-5


def test_what_is_left_out_would_be_noticed(folders):
    """Negative control: without the sum of partial gradients over ranks, losses come apart or copies do."""
    assert max(deviations(numbers(folders(2), "without marks"), numbers(folders(1), "one")).values()) > 10
