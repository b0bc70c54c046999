"""An adapter is trained in any layout as on one rank: losses, its tensors, moments and averages; its base stays."""

from pathlib import Path

import pytest

from megadit.models.configs.config import DiTConfig
from megadit.models.lora.adapters import adapter_key, targets_of
from megadit.models.megatron.checkpoint import NETWORK, model_key

from .conftest import MOVIEGEN, deviations, distance, numbers, relative, tensors_of

JOB = Path(__file__).parent / "jobs" / "layouts.py"

pytestmark = pytest.mark.slow

FEW = {"data": {"global_batch_size": 2}, "steps": 3}
"""Three steps: an adapter begins at zero, so that its first gradients are those of one factor alone."""
LORA = {"adapter": {"rank": 3, "alpha": 6.0, "targets": ["*"]}, **FEW}
"""Three divides over no two ranks: an adapter is never cut along its rank."""
DORA = {"adapter": {"rank": 3, "targets": ["*"], "kind": "dora"}, **FEW}
DROPPED = {"adapter": {"rank": 3, "targets": ["blocks.*"], "dropout": 0.3}, **FEW}
DEEP = {"model": {"num_layers": 4}}
EXPERTS = {"model": {"experts": {"num_experts": 4, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 20}}}
GROUPED = {"model": MOVIEGEN}
PREDICT2 = {
    "model": {"family": "cosmos", "parameterization": "flow", "adaln_lora_dim": 4, "padding_mask_channel": True}
}
WAN = {"model": {"family": "wan", "parameterization": "flow"}}
HALF_MOMENTS = {"optimizer": {"moments": "bf16"}}
IN_INT8 = {"train": {"base_precision": "int8"}}

TP = {"tensor_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
CP = {"context_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
VPP = {**PP, "virtual_pipeline_model_parallel_size": 2}
FSDP = {"data_parallel": "fsdp"}

ONE_RANK = {
    "lora": LORA,
    "deep": LORA | DEEP,
    "experts": LORA | EXPERTS,
    "dora": DORA,
    "dora-experts": DORA | EXPERTS,
    "half-moments": DORA | EXPERTS | HALF_MOMENTS,
    "dropped": DROPPED,
    "grouped": LORA | GROUPED,
    "predict2": LORA | PREDICT2,
    "wan": LORA | WAN,
    "int8": LORA | IN_INT8,
    "int8-dora": DORA | IN_INT8,
    "base": FEW | {"steps": 1},
    "base-int8": LORA | IN_INT8 | {"adapter": {"rank": 1, "targets": ["text_embedder"]}, "steps": 1},
}
LAYOUTS = {
    "lora sp": SP,
    "lora cp": CP,
    "lora fsdp": FSDP,
    "lora distributed optimizer": {"data_parallel": "distributed_optimizer"},
    "deep vpp": VPP,
    "experts ep": {"expert_model_parallel_size": 2},
    "dora sp": SP,
    "dora fsdp, recomputed": {**FSDP, "recompute_granularity": "full"},
    "dropped sp, attention recomputed": {**SP, "recompute_granularity": "selective"},
    "grouped sp": SP,
    "predict2 sp": SP,
    "wan sp": SP,
    "int8 sp": SP,
    "int8 pp": PP,
    "int8-dora sp, recomputed": {**SP, "recompute_granularity": "full"},
}
"""The first word is that of the counterpart on one rank."""
TP_EP = {**SP, "expert_model_parallel_size": 2}
FOUR_RANKS = {"dora-experts tp x ep": TP_EP, "half-moments tp x ep": TP_EP}
MARK = "sequence parallel mark"
BROKEN = {"exchange of adapters": TP, MARK: SP}


def cases(ranks):
    if ranks == 1:
        return ONE_RANK
    layouts = {2: LAYOUTS, 4: FOUR_RANKS}[ranks]
    found = {name: {**ONE_RANK[name.split()[0]], "parallel": parallel} for name, parallel in layouts.items()}
    if ranks == 4:
        return found | {"without sequence parallel mark": {**found["dora-experts tp x ep"], "broken": MARK}}
    broken = {f"without {what}": {**ONE_RANK["lora"], "parallel": BROKEN[what], "broken": what} for what in BROKEN}
    half = {"half fsdp": {**ONE_RANK["lora"], "parallel": FSDP, "precision": "bf16"}}
    return found | broken | half


@pytest.fixture(scope="module")
def folder(folders_of):
    return folders_of(cases, JOB, timeout=560)


def tensors(folder, name, prefix):
    return tensors_of(folder / name, prefix)


@pytest.mark.parametrize(("ranks", "name"), [*((2, name) for name in LAYOUTS), (4, "dora-experts tp x ep")])
def test_a_layout_trains_an_adapter_as_one_rank_does(folder, ranks, name):
    one_rank = name.split()[0]
    ours, one = numbers(folder(ranks), name), numbers(folder(1), one_rank)
    assert max(deviations(ours, one).values()) < 1, deviations(ours, one)
    for prefix, allowed in (("model.", 1e-5), ("ema.", 1e-5), ("optimizer.", 1e-4)):
        expected = tensors(folder(1), one_rank, prefix)
        assert distance(tensors(folder(ranks), name, prefix), expected) < allowed, prefix
    assert ours["changed"] == []


def test_half_moments_of_dora_are_clipped_alike_by_tensor_and_expert_parallel_ranks(folder):
    """Equal before a moment is rounded, which ranks do for themselves; gradients exceed `clip_grad`."""
    ours, one = numbers(folder(4), "half-moments tp x ep"), numbers(folder(1), "half-moments")
    assert min(one["grad_norm"]) > 0.5
    for name, exact, near in (("loss", 1e-6, 1e-4), ("grad_norm", 1e-5, 1e-3)):
        assert relative(ours[name][:2], one[name][:2]) < exact and relative(ours[name], one[name]) < near
    assert ours["spread"] == 0 and ours["changed"] == []


@pytest.mark.parametrize("name", [name for name in ONE_RANK if not name.startswith("base")])
def test_every_tensor_of_an_adapter_learns_and_nothing_else_is_kept(folder, name):
    found = tensors(folder(1), name, model_key(NETWORK))
    assert found and all(adapter_key(key.removeprefix(model_key(NETWORK))) for key in found)
    moments = tensors(folder(1), name, "optimizer.exp_avg.dit")
    assert len(moments) == len(found) and all(moment.norm() > 0 for moment in moments.values())
    assert numbers(folder(1), name)["changed"] == []


def test_it_begins_where_its_base_is(folder):
    lora, dora, base = (numbers(folder(1), name)["loss"][0] for name in ("lora", "dora", "base"))
    assert lora == dora == base


def test_in_eight_bits_it_begins_near_its_base(folder):
    """Half of a step in 127 is off by up to 0.4 % of a row's largest weight."""
    lora, dora, base, whole = (
        numbers(folder(1), name)["loss"][0] for name in ("int8", "int8-dora", "base-int8", "base")
    )
    assert lora == dora == base != whole
    assert relative([base], [whole]) < 1e-2


def test_its_targets_are_all_linears(folder):
    config = DiTConfig(num_layers=2, hidden_size=48, num_attention_heads=12, head_dim=8)
    keys = [adapter_key(key.removeprefix(model_key(NETWORK))) for key in tensors(folder(1), "lora", "model.dit.")]
    assert {key.rpartition(".")[0] for key in keys} == set(targets_of(config))


def test_fsdp_in_half_precision_is_near(folder):
    """The base in bfloat16, the adapter in float32, gathered together."""
    ours, one = numbers(folder(2), "half fsdp"), numbers(folder(1), "lora")
    assert relative(ours["loss"], one["loss"]) < 2e-2
    assert ours["changed"] == [] and ours["spread"] == 0


@pytest.mark.parametrize(("ranks", "what", "one"), [*((2, what, "lora") for what in BROKEN), (4, MARK, "dora-experts")])
def test_what_is_left_out_is_seen(folder, ranks, what, one):
    found = deviations(numbers(folder(ranks), f"without {what}"), numbers(folder(1), one))
    assert max(found.values()) > 2, found
