"""Every layout trains the same network: plain torch = Megatron on one rank = any of its layouts on 2, 4 and 8 ranks.

Packs hold images and videos of unequal lengths, that do not divide among ranks; text is dropped from some; all tensors
are random and every gradient must differ from zero, so that nothing wrong can hide behind adaLN-Zero. Beside what must
hold stand mistakes that raise nothing: each must be seen.
"""

import json
from pathlib import Path

import pytest
import safetensors.torch

from .conftest import deviations, distance, relative, tensors_of

JOB = Path(__file__).parent / "jobs" / "layouts.py"

pytestmark = pytest.mark.slow


def case(**parallel):
    return {"parallel": parallel}


TP = {"tensor_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
CP = {"context_parallel_size": 2}
RING = {**CP, "context_parallel_comm": "ring"}
PP = {"pipeline_model_parallel_size": 2}
VPP = {**PP, "virtual_pipeline_model_parallel_size": 2}
DISTRIBUTED = {"data_parallel": "distributed_optimizer"}
FSDP = {"data_parallel": "fsdp"}
DEEP = {"model": {"num_layers": 4}}
"""Two layers are enough, but for four pipeline stages, or two of two parts each."""
MUON = {"optimizer": {"optimizer": "muon"}}
BY_ONEDNN = {"products": "onednn"}
"""Which would be asked for larger products only."""
ONE_TOKEN = {"data": {"mock_latent_shapes": [[1, 1, 1], [2, 3, 8]], "seq_length": 48}}
"""Micro-batches of one token and of 48 in turn: of the first, all ranks of a sample but one have padding alone."""

ONE_RANK = {
    "torch": {"is_torch": True},
    "one": {"gradients": True},
    "accumulated": {"data": {"micro_batch_size": 4}},
    "muon": MUON,
    "deep": DEEP,
    "one token": ONE_TOKEN,
}
EXACT = {
    2: {
        "ddp": {},
        "distributed optimizer": case(**DISTRIBUTED),
        "fsdp": case(**FSDP),
        "fsdp, by oneDNN": case(**FSDP) | BY_ONEDNN,
        "fsdp, recomputed": case(**FSDP, recompute_granularity="full"),
        "tp": case(**TP),
        "sp": case(**SP),
        "sp, by oneDNN": case(**SP) | BY_ONEDNN,
        "cp": case(**CP),
        "ring, attention recomputed": case(**RING, recompute_granularity="selective"),
        "cp + fsdp, one block recomputed": case(**CP, **FSDP, recompute_granularity="full", recompute_num_layers=1),
        "pp": case(**PP),
        "vpp, recomputed": DEEP | case(**VPP, recompute_granularity="full"),
        "nothing overlaps": case(**DISTRIBUTED, overlap_grad_reduce=False, overlap_param_gather=False),
    },
    4: {
        "cp4": case(context_parallel_size=4),
        "ring4": case(context_parallel_size=4, context_parallel_comm="ring"),
        "ring + dp + distributed optimizer": case(**RING, **DISTRIBUTED),
        "cp4, heads and ring": case(context_parallel_size=4, context_parallel_comm="both"),
        "pp4": DEEP | case(pipeline_model_parallel_size=4),
        "sp + fsdp": case(**SP, **FSDP),
        "fsdp4": case(**FSDP),
        "one token and 48 in turn, cp4": ONE_TOKEN | case(context_parallel_size=4),
        "one token and 48 in turn, ring4": ONE_TOKEN | case(context_parallel_size=4, context_parallel_comm="ring"),
    },
    8: {
        "ring + sp + vpp + distributed optimizer": DEEP | case(**RING, **SP, **VPP, **DISTRIBUTED),
        "cp + sp + fsdp": case(**CP, **SP, **FSDP),
    },
}
"""Layouts on so many ranks that train as one rank does."""
HALF = {
    "bf16 ddp": {},
    "bf16 fsdp": case(**FSDP),
    "bf16 sp": case(**SP),
    "bf16 ring": case(**RING),
    "bf16 vpp": DEEP | case(**VPP),
}
MUONS = {
    "distributed optimizer": MUON | case(**DISTRIBUTED),
    "tp": MUON | case(**TP),
    "pp": MUON | case(**PP),
}
BROKEN = {
    "sequence parallel mark": case(**SP),
    "sum of norms": case(**TP),
    "sum over stages": case(**PP),
    "counted once": case(**PP),
    "sum over copies": case(overlap_grad_reduce=False),
    "sum over shares": case(**CP, overlap_grad_reduce=False),
    "order of tokens": case(**CP),
    "keys of others": case(**RING),
    "divided once": case(**FSDP),
    "batched sends": DEEP | case(**VPP),
}
"""One mark or one exchange taken out, of the layout that needs it."""

JOBS = {
    1: ONE_RANK,
    2: {
        **EXACT[2],
        **{name: {**one, "precision": "bf16"} for name, one in HALF.items()},
        **{f"muon {name}": one for name, one in MUONS.items()},
        **{f"without {name}": {**one, "broken": name} for name, one in BROKEN.items()},
    },
    4: EXACT[4],
    8: EXACT[8],
}
ALL_EXACT = [(ranks, name) for ranks, cases in EXACT.items() for name in cases]


@pytest.fixture(scope="module")
def results(run_ranks, tmp_path_factory):
    """found(ranks, name): the numbers of a case, and found.tensors(...): those of its checkpoint."""
    return Results(run_ranks, tmp_path_factory)


class Results:
    """Each number of ranks is run when it is asked for."""

    def __init__(self, run_ranks, tmp_path_factory):
        self._run, self._make_folder, self._folders = run_ranks, tmp_path_factory, {}

    def folder(self, ranks):
        if ranks not in self._folders:
            folder = self._make_folder.mktemp(f"ranks{ranks}")
            (folder / "cases.json").write_text(json.dumps(JOBS[ranks]))
            self._run(ranks, JOB, folder, timeout=560)
            self._folders[ranks] = folder
        return self._folders[ranks]

    def __call__(self, ranks, name):
        return json.loads((self.folder(ranks) / f"{name}.json").read_text())

    def tensors(self, ranks, name, prefix):
        return tensors_of(self.folder(ranks) / name, prefix)


def test_megatron_on_one_rank_is_torch(results):
    files = [results.folder(1) / name / "gradients.safetensors" for name in ("torch", "one")]
    by_torch, by_megatron = (safetensors.torch.load_file(file) for file in files)
    # the same operations; Megatron adds gradients of micro-batches into a buffer and divides afterwards
    assert distance(by_megatron, by_torch) < 1e-6
    assert relative(results(1, "one")["loss"][:1], results(1, "torch")["loss"]) < 1e-6
    assert all(gradient.norm() > 1e-6 for gradient in by_torch.values()), "every parameter has a gradient"
    assert "grad.dit.null_text" in by_torch and "grad.uncertainty.linear.weight" in by_torch


def one_rank_of(ranks, name):
    """Its counterpart on one rank."""
    case = JOBS[ranks][name]
    return next((one for one in ("deep", "one token") if ONE_RANK[one].items() <= case.items()), "one")


@pytest.mark.parametrize(("ranks", "name"), [(1, "accumulated"), *ALL_EXACT])
def test_a_layout_trains_as_one_rank_does(results, ranks, name):
    one_rank = one_rank_of(ranks, name)
    one, ours = results(1, one_rank), results(ranks, name)
    assert max(deviations(ours, one).values()) < 1, deviations(ours, one)
    assert distance(results.tensors(ranks, name, "model."), results.tensors(1, one_rank, "model.")) < 1e-5
    for count in ("tokens", "samples", "flops"):
        assert ours[count] == one[count]


@pytest.mark.parametrize(("ranks", "name"), ALL_EXACT)
def test_a_layout_leaves_the_same_averages_and_moments(results, ranks, name):
    for prefix, allowed in (("ema.", 1e-5), ("optimizer.", 1e-4)):
        one = results.tensors(1, one_rank_of(ranks, name), prefix)
        assert distance(results.tensors(ranks, name, prefix), one) < allowed, prefix


@pytest.mark.parametrize(("ranks", "name"), ALL_EXACT)
def test_a_layout_denoises_as_one_rank_does(results, ranks, name):
    pairs = zip(results(ranks, name)["sampled"], results(1, one_rank_of(ranks, name))["sampled"], strict=True)
    assert max(abs(x - y) for x, y in pairs) < 1e-4


@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_near(results, name):
    one, ours = results(1, one_rank_of(2, name)), results(2, name)
    # bfloat16 has 8 bits: 4e-3 of every value, some of which averages out over tokens
    assert relative(ours["loss"], one["loss"]) < 1e-2
    assert relative(ours["grad_norm"], one["grad_norm"]) < 5e-2
    assert ours["spread"] == 0


@pytest.mark.parametrize("name", MUONS)
def test_muon_on_two_ranks_is_muon_on_one(results, name):
    one, ours = results(1, "muon"), results(2, f"muon {name}")
    # orthogonalised in bfloat16, where a last bit of the gradient can turn into 1e-2 of an update
    assert relative(ours["loss"], one["loss"]) < 1e-4
    assert relative(ours["grad_norm"], one["grad_norm"]) < 1e-3
    assert distance(results.tensors(2, f"muon {name}", "model."), results.tensors(1, "muon", "model.")) < 1e-3


@pytest.mark.parametrize(("ranks", "name"), [(2, "fsdp"), (4, "fsdp4")])
def test_fsdp_divides_parameters_gradients_and_state(results, ranks, name):
    held = results(ranks, name)["bytes"]
    whole = results(ranks, name)["bytes"]["whole"]
    for kind, copies in (("parameters", 1), ("gradients", 1), ("state", 2)):
        assert held[kind] <= 1.1 / ranks * copies * whole, kind


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_left_out_is_seen(results, name):
    found = deviations(results(2, f"without {name}"), results(1, one_rank_of(2, f"without {name}")))
    assert max(found.values()) > 2, found
