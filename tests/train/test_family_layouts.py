"""Networks of published structures train alike under tensor, sequence, context and pipeline parallelism and FSDP.

The job and what is compared are those of `test_layouts.py`; every tensor is random and must have a gradient.
"""

import json
from pathlib import Path

import pytest
import safetensors.torch

from megadit.models.megatron.checkpoint import _read

JOB = Path(__file__).parent / "jobs" / "layouts.py"

pytestmark = pytest.mark.slow

COSMOS = {
    "family": "cosmos",
    "num_layers": 2,
    "adaln_lora_dim": 4,
    "learned_positions": [4, 5, 5],
    "padding_mask_channel": True,
}
CLASSES = {
    "family": "dit",
    "num_layers": 2,
    "position_embedding": "sincos",
    "qk_layernorm": False,
    "num_classes": 5,
    "crossattn_emb_size": 2,
    "learned_variance": True,
}
NEMO = {"family": "nemo", "num_layers": 2, "position_embedding": "sincos", "hidden_size": 256}
FAMILIES = {"cosmos": COSMOS, "dit": CLASSES, "nemo": NEMO}
LAYOUTS = {
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp": {"context_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "fsdp": {"data_parallel": "fsdp"},
}
PAIRS = [(f, name) for f in FAMILIES for name in LAYOUTS if f == "cosmos" or name != "fsdp"]
"""Sharded fully are only networks of ours and Cosmos; others are refused."""


def cases(ranks):
    if ranks == 1:
        references = {f"{family} torch": {"is_torch": True, "model": model} for family, model in FAMILIES.items()}
        return references | {f"{family} one": {"gradients": True, "model": m} for family, m in FAMILIES.items()}
    whole = {f"{f} {name}": {"model": FAMILIES[f], "parallel": LAYOUTS[name]} for f, name in PAIRS}
    broken = {"model": COSMOS, "parallel": LAYOUTS["sp"], "broken": "sequence parallel mark"}
    return whole | {"cosmos without its marks": broken}


@pytest.fixture(scope="module", params=[2])
def folders(run_ranks, tmp_path_factory, request):
    """Ranks -> where the results of their cases are."""
    found = {}
    for ranks in (1, request.param):
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        (folder / "cases.json").write_text(json.dumps(cases(ranks)))
        run_ranks(ranks, JOB, folder)
        found[ranks] = folder
    return found


def distance(ours, theirs):
    assert ours and set(ours) == set(theirs)
    return max(((ours[key] - theirs[key]).norm() / theirs[key].norm()).item() for key in theirs)


def losses(folder, name):
    return json.loads((folder / f"{name}.json").read_text())["loss"]


@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_on_one_rank_is_torch(folders, family):
    files = [folders[1] / f"{family} {name}" / "gradients.safetensors" for name in ("torch", "one")]
    by_torch, by_megatron = (safetensors.torch.load_file(file) for file in files)
    for name, gradient in by_torch.items():
        assert gradient.norm() > 0, f"{name} has no gradient"
    # the same operations; Megatron adds gradients of micro-batches into a buffer and divides afterwards
    assert distance(by_megatron, by_torch) < 1e-5


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_a_layout_trains_as_one_rank_does(folders, family, layout):
    one, ours = losses(folders[1], f"{family} one"), losses(folders[2], f"{family} {layout}")
    # sums are taken in parts, which float32 rounds otherwise
    assert max(abs(x - y) / y for x, y in zip(ours, one, strict=True)) < 2e-6
    tensors = [_read(folder / name / "tensors", "model.") for folder, name in _pair(folders, family, layout)]
    assert distance(*tensors) < 2e-5


def _pair(folders, family, layout):
    return (folders[2], f"{family} {layout}"), (folders[1], f"{family} one")


def test_a_missing_mark_would_be_noticed(folders):
    """Negative control: without the sum of partial gradients over tensor-parallel ranks, losses come apart."""
    one, broken = losses(folders[1], "cosmos one"), losses(folders[2], "cosmos without its marks")
    assert max(abs(x - y) / y for x, y in zip(broken, one, strict=True)) > 1e-5
