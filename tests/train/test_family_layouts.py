"""Networks of published structures train alike under tensor, sequence, context and pipeline parallelism and FSDP.

The job and what is compared are those of `test_layouts.py`; every tensor is random and must have a gradient.
"""

from pathlib import Path

import pytest
import safetensors.torch

from .conftest import MOVIEGEN, deviations, distance, numbers, tensors_of

JOB = Path(__file__).parent / "jobs" / "layouts.py"

pytestmark = pytest.mark.slow

COSMOS = {
    "family": "cosmos",
    "adaln_lora_dim": 4,
    "learned_positions": [4, 5, 5],
    "padding_mask_channel": True,
}
CLASSES = {
    "family": "dit",
    "position_embedding": "sincos",
    "qk_layernorm": False,
    "num_classes": 5,
    "crossattn_emb_size": 2,
    "learned_variance": True,
}
NEMO = {"family": "nemo", "position_embedding": "sincos", "hidden_size": 256}
DFM = {"family": "dfm", "hidden_size": 256, "adaln_lora_dim": 4}
MOVIEGEN_NEMO = MOVIEGEN | {"compat": "nemo", "hidden_size": 256}
WAN = {"family": "wan", "parameterization": "flow"}
ST_DIT = {"family": "st_dit", "adaln_lora_dim": 4}
FAMILIES = {
    "cosmos": COSMOS,
    "dit": CLASSES,
    "nemo": NEMO,
    "dfm": DFM,
    "moviegen": MOVIEGEN,
    "moviegen_nemo": MOVIEGEN_NEMO,
    "st_dit": ST_DIT,
    "wan": WAN,
}
LAYOUTS = {
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp": {"context_parallel_size": 2},
    "ring": {"context_parallel_size": 2, "context_parallel_comm": "ring"},
    "pp": {"pipeline_model_parallel_size": 2},
    "fsdp": {"data_parallel": "fsdp"},
}
WIDE = {
    "cp + sp + pp + distributed optimizer": {
        **LAYOUTS["cp"],
        **LAYOUTS["sp"],
        **LAYOUTS["pp"],
        "data_parallel": "distributed_optimizer",
    },
    "sp + fsdp": {**LAYOUTS["sp"], **LAYOUTS["fsdp"]},
    "cp + pp": {**LAYOUTS["cp"], **LAYOUTS["pp"]},
}
ON_TWO = {
    "sp": FAMILIES,
    "cp": ("cosmos", "st_dit", "wan"),
    "ring": ("st_dit",),
    "pp": ("dit", "dfm", "moviegen", "wan"),
    "fsdp": ("cosmos", "st_dit", "wan"),
}
"""Each family's own parameters have marks; each kind of positions, of copies and of blocks is divided once."""
ON_MORE = [
    (4, "moviegen", "sp + fsdp"),
    (4, "st_dit", "cp + pp"),
    (8, "moviegen", "cp + sp + pp + distributed optimizer"),
]
WEIGHTS = {"averages": False}
"""Without averages, which are compared elsewhere."""
PAIRS = [*((2, family, name) for name, families in ON_TWO.items() for family in families), *ON_MORE]
"""(ranks, family, layout)."""


def broken(family, what, layout):
    return {"model": FAMILIES[family], "parallel": LAYOUTS[layout], "broken": what}


BROKEN = {
    "cosmos without its marks": broken("cosmos", "sequence parallel mark", "sp"),
    "moviegen without its marks": broken("moviegen", "sequence parallel mark", "sp"),
    "moviegen without the sum over stages": broken("moviegen", "sum over stages", "pp"),
    "st_dit without its marks": broken("st_dit", "sequence parallel mark", "sp"),
    "wan without the norm over all heads": broken("wan", "norm over the heads of all ranks", "sp"),
    "wan without its marks": broken("wan", "sequence parallel mark", "sp"),
    "st_dit with moved tokens": broken("st_dit", "moved tokens", "ring"),
}


def cases(ranks):
    if ranks == 1:
        references = {f"{family} torch": {"is_torch": True, "model": model} for family, model in FAMILIES.items()}
        return references | {
            f"{family} one": WEIGHTS | {"gradients": True, "model": m} for family, m in FAMILIES.items()
        }
    parallel = LAYOUTS | WIDE
    whole = {
        f"{f} {name}": WEIGHTS | {"model": FAMILIES[f], "parallel": parallel[name]}
        for n, f, name in PAIRS
        if n == ranks
    }
    return whole | (BROKEN if ranks == 2 else {})


@pytest.fixture(scope="module")
def folders(folders_of):
    return folders_of(cases, JOB, timeout=560)


@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_on_one_rank_is_torch(folders, family):
    files = [folders(1) / f"{family} {name}" / "gradients.safetensors" for name in ("torch", "one")]
    by_torch, by_megatron = (safetensors.torch.load_file(file) for file in files)
    for name, gradient in by_torch.items():
        assert gradient.norm() > 0, f"{name} has no gradient"
    # the same operations; Megatron adds gradients of micro-batches into a buffer and divides afterwards
    assert distance(by_megatron, by_torch) < 1e-5


@pytest.mark.parametrize(("ranks", "family", "layout"), PAIRS)
def test_a_layout_trains_as_one_rank_does(folders, ranks, family, layout):
    found = deviations(numbers(folders(ranks), f"{family} {layout}"), numbers(folders(1), f"{family} one"))
    assert found["loss"] < 2 and found["grad_norm"] < 1 and found["spread"] == 0, found
    names = (folders(ranks) / f"{family} {layout}", folders(1) / f"{family} one")
    assert distance(*(tensors_of(name, "model.") for name in names)) < 2e-5


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_left_out_would_be_noticed(folders, name):
    """Negative control: without the sum of partial gradients over ranks, losses come apart or copies do."""
    family = name.partition(" ")[0]
    assert max(deviations(numbers(folders(2), name), numbers(folders(1), f"{family} one")).values()) > 10
