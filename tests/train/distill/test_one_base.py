"""Student, teacher and critic as adapters beside one set of weights: what they learn, in any layout, and its memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megadit.models.configs.adapter import AdapterConfig
from megadit.models.configs.block import ExpertConfig
from megadit.models.convert.adapters.adapter import Adapter
from megadit.models.convert.adapters.files import write_adapter
from megadit.models.lora.adapters import adapter_state, attach
from megadit.models.megatron.checkpoint import _read
from megadit.models.networks.dit import DiT
from megadit.models.networks.registry import build_network
from megadit.train.engine.fully_sharded import share_base
from megadit.train.recipes import load_recipe

from ..conftest import distance
from .test_layouts import CHANNELS, CP, EXPERTS, OBJECTIVES, PP, SCALES, SP, deviation, in_layout, numbers, write

JOB = Path(__file__).parents[1] / "jobs" / "layouts.py"
TINY = replace(load_recipe("digits_tiny").model, num_layers=2, num_attention_heads=12, head_dim=8, in_channels=CHANNELS)
ADAPTER = AdapterConfig(rank=3, alpha=6.0)
FSDP = {"data_parallel": "fsdp"}
CASES = {
    "plain": {"adapter": {"rank": 3, "alpha": 6.0}},
    "guided": {"adapter": {"rank": 3, "alpha": 6.0}},
    "chained": {"adapter": {"rank": 3, "alpha": 6.0}},
    "dora": {"adapter": {"rank": 3, "kind": "dora", "targets": ["blocks.*"]}},
    "int8": {"adapter": {"rank": 3}, "train": {"base_precision": "int8"}},
    "experts": {"adapter": {"rank": 3, "targets": ["*"]}},
    "half": {"adapter": {"rank": 3, "alpha": 6.0}, "precision": "bf16"},
    "told": {"adapter": {"rank": 3, "targets": ["*"]}},
    "continuous": {"adapter": {"rank": 3}, "diffusion": {"learned_uncertainty": True}},
    "liked": {"adapter": {"rank": 3}},
}
LAYOUTS = {
    "plain sp": SP,
    "plain cp": CP,
    "plain fsdp, recomputed": {**FSDP, "recompute_granularity": "full"},
    "plain distributed optimizer": {"data_parallel": "distributed_optimizer"},
    "guided sp, recomputed": {**SP, "recompute_granularity": "full"},
    "chained fsdp": FSDP,
    "dora fsdp": FSDP,
    "int8 sp": SP,
    "experts ep": {"expert_model_parallel_size": 2},
    "told fsdp": FSDP,
    "continuous sp": SP,
    "liked pp": PP,
}
"""The first word is that of the counterpart on one rank; `told` has a critic's head, too."""
LEARNT = {
    "guided": {"objective": "guidance", "guidance": 3.0},
    "told": {**OBJECTIVES["adversarial"], "guidance": 1.0},
    "continuous": OBJECTIVES["continuous"],
    "liked": OBJECTIVES["nft"],
}
"""Case -> its objective, where that is not plain `matching`."""


def test_two_networks_of_one_memory_differ_by_their_adapters():
    torch.manual_seed(0)
    base = build_network(TINY)
    with torch.device("meta"):
        other = build_network(TINY)
    for network in (base, other):
        attach(network, ADAPTER)
        network.head = torch.nn.Linear(2, 1)  # such as a critic's, which is trained
    for parameter in base.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    share_base(other, base, torch.device("cpu"))
    own = [name for name, parameter in other.named_parameters() if parameter is not base.get_parameter(name)]
    assert not any(parameter.is_meta for parameter in other.parameters())
    assert {"head.weight", "head.bias"} <= {*own} and any(".adapters." in name for name in own)
    assert all(".adapters." in name or name.startswith("head.") for name in own)
    state = {name: torch.randn(value.shape) for name, value in other.state_dict().items() if ".adapters." in name}
    other.load_state_dict(state, strict=False)
    assert all(not torch.equal(base.get_parameter(name), value) for name, value in state.items())


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Bundles of random weights, and an adapter of the first."""
    kinds = {
        "": TINY,
        "experts": replace(TINY, experts=ExpertConfig(**EXPERTS)),
        "told": replace(TINY, guidance_embedding_range=tuple(SCALES)),
    }
    found = {kind: write(tmp_path_factory.mktemp("network") / "bundle", model, 3) for kind, model in kinds.items()}
    dit, generator = DiT(TINY), torch.Generator().manual_seed(5)
    attach(dit, ADAPTER)
    state = {key: 0.1 * torch.randn(value.shape, generator=generator) for key, value in adapter_state(dit).items()}
    found["adapter"] = tmp_path_factory.mktemp("adapter") / "one"
    write_adapter(found["adapter"], Adapter.from_state(state, ADAPTER, TINY))
    return found


def case_of(name, teachers):
    kind = name.split()[0]
    distill = {
        **LEARNT.get(kind, OBJECTIVES["matching"]),
        "teacher": str(teachers.get(kind, teachers[""])),
    }
    if kind == "chained":
        distill["teacher_adapter"] = str(teachers["adapter"])
    has = {"experts": {"experts": EXPERTS}, "told": {"guidance_embedding_range": SCALES}}
    model = {"in_channels": CHANNELS, **has.get(kind, {})}
    return {"distill": distill, "model": model, "data": {"global_batch_size": 2, "micro_batch_size": 2}, **CASES[kind]}


@pytest.fixture(scope="module")
def folder(folders_of, teachers):
    one = {name: case_of(name, teachers) for name in CASES}
    one |= {f"{name} apart": {**case, "apart": True} for name, case in one.items()}
    two = {name: in_layout(case_of(name, teachers), parallel) for name, parallel in LAYOUTS.items()}
    return folders_of({1: one, 2: two}.__getitem__, JOB, timeout=560)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_set_of_weights_is_as_good_as_three(folder, name):
    """To the last bit: the same products of the same numbers."""
    ours, apart = numbers(folder(1), name), numbers(folder(1), f"{name} apart")
    assert ours["apart"] == 0 < apart["apart"]
    assert ours["loss"] == apart["loss"] and ours["critic_loss"] == apart["critic_loss"]
    found, expected = (_read(folder(1) / each / "tensors", "") for each in (name, f"{name} apart"))
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    beside = {"told": "adversary.", "continuous": "uncertainty."}
    assert all(".adapters." in key or beside.get(name, " ") in key for key in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_adapters_of_student_and_critic_as_one_rank_does(folder, name):
    counterpart = name.split()[0]
    ours, one = numbers(folder(2), name), numbers(folder(1), counterpart)
    assert deviation(ours, one) < 1e-6 and ours["apart"] == 0 and ours["changed"] == []
    for prefix in ("model.", *(["critic.model."] if one["critic_loss"] else [])):
        found, expected = (_read(where / "tensors", prefix) for where in (folder(2) / name, folder(1) / counterpart))
        assert distance(found, expected) < 1e-4, prefix


@pytest.mark.slow
def test_what_an_adapter_of_the_teacher_adds_is_learnt_from(folder):
    assert numbers(folder(1), "chained")["loss"] != numbers(folder(1), "plain")["loss"]
