"""Experts, on however many ranks they are, train as they do on one; the same tokens go to the same experts.

The job and what is compared are those of `test_layouts.py`: unequal images and videos, dropped text, every tensor
random. Beside what must hold stand mistakes that raise nothing: each must be seen.
"""

from pathlib import Path

import pytest
import safetensors.torch

from .conftest import MOVIEGEN, deviations, distance, numbers, tensors_of

JOB = Path(__file__).parent / "jobs" / "layouts.py"

pytestmark = pytest.mark.slow

TOKENS = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 20, "balance_coefficient": 0.5}
CHOICE = {"num_experts": 8, "routing": "expert_choice", "capacity_factor": 2.5, "ffn_hidden_size": 24}
SEEDS = {"tokens": 0, "experts": 1, "moviegen": 0}
"""With which no decision is close."""
KINDS = {"tokens": {"experts": TOKENS}, "experts": {"experts": CHOICE}, "moviegen": {**MOVIEGEN, "experts": TOKENS}}
"""In a block: tokens choose, experts choose; in one whose MLPs are gated."""
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CP = {"context_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
DISTRIBUTED = {"data_parallel": "distributed_optimizer"}
FSDP = {"data_parallel": "fsdp"}


def ep(size, tensor=1):
    return {"expert_model_parallel_size": size, "expert_tensor_parallel_size": tensor}


LAYOUTS = {
    2: {
        "tokens": {
            "ep": ep(2),
            "tp": TP,
            "cp": CP,
            "experts cut": {**TP, **ep(1, 2)},
            "fsdp + ep": {**FSDP, **ep(2)},
            "pp, recomputed": {**PP, "recompute_granularity": "full"},
        },
        "experts": {"ep": ep(2), "tp": TP, "cp": CP},
        "moviegen": {"ep": ep(2), "tp": TP},
    },
    4: {
        "tokens": {
            "ep4": ep(4),
            "tp x ep, experts cut": {**TP, **ep(2, 2)},
            "ep + distributed optimizer": {**DISTRIBUTED, **ep(2)},
        },
        "experts": {"tp x ep": {**TP, **ep(2)}, "cp + fsdp + ep4": {**CP, **FSDP, **ep(4)}},
        "moviegen": {"tp x ep": {**TP, **ep(2)}},
    },
    8: {
        "tokens": {"cp + tp + sp + pp + distributed optimizer + ep": {**CP, **TP, **PP, **DISTRIBUTED, **ep(2)}},
    },
}
"""Layouts on so many ranks, of each kind."""
BROKEN = {
    "scores of others": ("experts", CP),
    "loads of others": ("tokens", {}),
    "sum over holders of an expert": ("tokens", {"overlap_grad_reduce": False}),
    "weight of an expert": ("tokens", ep(2)),
    "norm of experts": ("tokens", ep(2)),
}
"""One exchange, sum or mark taken out, of a layout that needs it."""


def case(kind, parallel=None, **settings):
    # two layers of eight experts make about 3,000 decisions in two steps
    return {"model": KINDS[kind], "parallel": parallel or {}, "train": {"seed": SEEDS[kind]}, **settings}


def jobs(ranks):
    if ranks == 1:
        references = {f"{kind} torch": case(kind, is_torch=True) for kind in KINDS}
        return references | {f"{kind} one": case(kind, gradients=True) for kind in KINDS}
    found = {f"{kind} {name}": case(kind, one) for kind, named in LAYOUTS[ranks].items() for name, one in named.items()}
    if ranks == 2:
        found |= {f"without {name}": case(kind, layout, broken=name) for name, (kind, layout) in BROKEN.items()}
    return found


EXACT = [(ranks, name) for ranks in LAYOUTS for name in jobs(ranks) if not name.startswith("without")]


@pytest.fixture(scope="module")
def folder(folders_of):
    return folders_of(jobs, JOB, timeout=560)


@pytest.mark.parametrize("kind", KINDS)
def test_megatron_on_one_rank_is_torch(folder, kind):
    files = [folder(1) / f"{kind} {name}" / "gradients.safetensors" for name in ("torch", "one")]
    by_torch, by_megatron = (safetensors.torch.load_file(file) for file in files)
    assert distance(by_megatron, by_torch) < 1e-6
    assert all(gradient.norm() > 1e-6 for gradient in by_torch.values()), "every parameter has a gradient"
    assert "grad.dit.blocks.1.mlp.experts.fc2" in by_torch and "grad.dit.blocks.0.mlp.router.weight" in by_torch


@pytest.mark.parametrize("kind", KINDS)
def test_no_decision_is_so_close_that_rounding_could_turn_it(folder, kind):
    # scores are rounded to 1e-7 of their size, and small differences of inputs add to that
    assert numbers(folder(1), f"{kind} one")["margin"] > 3e-6


@pytest.mark.parametrize(("ranks", "name"), EXACT)
def test_a_layout_trains_as_one_rank_does(folder, ranks, name):
    one = f"{name.partition(' ')[0]} one"
    ours, theirs = numbers(folder(ranks), name), numbers(folder(1), one)
    assert max(deviations(ours, theirs).values()) < 1, deviations(ours, theirs)
    if "recomputed" not in name:  # where choosing is repeated
        assert ours["decisions"] == theirs["decisions"]
    for prefix, allowed in (("model.", 1e-5), ("ema.", 1e-5), ("optimizer.", 1e-4)):
        tensors = [tensors_of(folder(n) / case, prefix) for n, case in ((ranks, name), (1, one))]
        assert distance(*tensors) < allowed, prefix
    pairs = zip(ours["sampled"], theirs["sampled"], strict=True)
    assert max(abs(x - y) for x, y in pairs) < 1e-4
    assert all(ours[count] == theirs[count] for count in ("tokens", "samples", "flops"))


def test_fsdp_divides_experts_on_ranks_of_their_own(folder):
    held = numbers(folder(2), "tokens fsdp + ep")["bytes"]
    whole = numbers(folder(1), "tokens one")["num_bytes"]
    assert held["parameters"] <= 1.15 / 2 * whole


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_left_out_is_seen(folder, name):
    found = deviations(numbers(folder(2), f"without {name}"), numbers(folder(1), f"{BROKEN[name][0]} one"))
    assert max(found.values()) > 2, found
