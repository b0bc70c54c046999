"""The rules of layouts: every refusal names the rule and a layout that works."""

import re
from dataclasses import replace

import pytest

from megadit.models.configs.block import ExpertConfig
from megadit.models.configs.config import DiTConfig, TextTowerConfig
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.megatron.parallel_sizes import SETTINGS, ParallelSizes, legal_layouts
from megadit.models.shared.errors import UserError

MODEL = DiTConfig(num_layers=4, hidden_size=48, num_attention_heads=6)
TOWERS = replace(NAMED_CONFIGS["clip_digits"], num_layers=4, text_tower=TextTowerConfig(num_layers=6))


@pytest.mark.parametrize(
    ("sizes", "ranks", "words"),
    [
        (ParallelSizes(tensor=3), 4, "4 ranks cannot hold whole replicas .*: start 3 or 6 ranks"),
        (ParallelSizes(tensor=4), 4, "does not divide model.num_attention_heads=6.*tensor_model_parallel_size=2"),
        (ParallelSizes(sequence_parallel=True), 4, "sequence_parallel=true needs"),
        (ParallelSizes(context=4), 4, "does not divide the 6 heads.*context_parallel_comm=both"),
        (ParallelSizes(tensor=2, context=2), 4, "does not divide the 3 heads.*context_parallel_comm=both"),
        (ParallelSizes(pipeline=8), 8, "do not divide model.num_layers=4.*pipeline_model_parallel_size=4"),
        (ParallelSizes(virtual_pipeline=2), 2, "one stage has nothing to interleave"),
        (ParallelSizes(pipeline=2, virtual_pipeline=4), 2, "do not divide model.num_layers=4"),
        (ParallelSizes(pipeline=2, fully_sharded=True), 4, "parallel.data_parallel=fsdp"),
    ],
)
def test_impossible_layouts(sizes, ranks, words):
    with pytest.raises(UserError, match=words) as error:
        sizes.check(MODEL, ranks)
    nearest = str(error.value).partition("the nearest layout that works")[2]
    assert any(setting in nearest for setting in SETTINGS.values())


def test_a_stage_holds_equally_many_layers_of_either_tower():
    with pytest.raises(UserError, match="4 model chunks .* do not divide model.text_tower.num_layers=6") as error:
        ParallelSizes(pipeline=4).check(TOWERS, 4)
    assert str(error.value).endswith("parallel.pipeline_model_parallel_size=2")
    assert ParallelSizes(pipeline=2).check(TOWERS, 4) == 2


@pytest.mark.parametrize("size", ["tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor"])
def test_a_size_is_one_or_more(size):
    with pytest.raises(UserError, match=f"{SETTINGS[size]}=0 must be 1 or more"):
        ParallelSizes(**{size: 0})


def test_the_mlp_must_divide_among_tensor_parallel_ranks():
    model = DiTConfig(hidden_size=48, num_attention_heads=6, ffn_hidden_size=99)
    with pytest.raises(UserError, match="model.ffn_hidden_size=99"):
        ParallelSizes(tensor=2).check(model)


@pytest.mark.parametrize(
    ("sizes", "data_parallel"),
    [
        (ParallelSizes(), 8),
        (ParallelSizes(tensor=2, sequence_parallel=True), 4),
        (ParallelSizes(context=4, context_comm="ring"), 2),
        (ParallelSizes(tensor=2, context=2, context_comm="both"), 2),
        (ParallelSizes(pipeline=2, virtual_pipeline=2, tensor=2), 2),
        (ParallelSizes(fully_sharded=True, context=2), 4),
    ],
)
def test_possible_layouts(sizes, data_parallel):
    assert sizes.check(MODEL, 8) == data_parallel


EXPERTS = DiTConfig(num_layers=4, hidden_size=48, num_attention_heads=6, experts=ExpertConfig(num_experts=6))


@pytest.mark.parametrize(
    ("sizes", "ranks", "words"),
    [
        (ParallelSizes(expert=4), 4, "expert_model_parallel_size=4 does not divide model.experts.num_experts=6"),
        (ParallelSizes(expert=3), 4, "the 4 ranks of a stage cannot hold whole sets of experts over 3 "),
        (
            ParallelSizes(expert_tensor=5),
            5,
            "expert_tensor_parallel_size=5 does not divide model.experts.ffn_hidden_size=192",
        ),
        (ParallelSizes(tensor=2, expert=2), 4, "experts need parallel.sequence_parallel=true"),
    ],
)
def test_experts_must_divide(sizes, ranks, words):
    with pytest.raises(UserError, match=words) as error:
        sizes.check(EXPERTS, ranks)
    assert "the nearest layout that works" in str(error.value)


def test_a_network_without_experts_divides_none():
    with pytest.raises(UserError, match="split experts, and the network has none.*expert_model_parallel_size=1"):
        ParallelSizes(expert=2).check(MODEL, 4)


def test_experts_lie_across_copies_or_within_one():
    across, within = ParallelSizes(expert=6), ParallelSizes(tensor=2, sequence_parallel=True, expert=2)
    assert across.check(EXPERTS) == 6 and across.smallest_world == 6 and across.copies_work_together
    assert within.check(EXPERTS) == 1 and not within.copies_work_together
    assert not ParallelSizes(tensor=2, sequence_parallel=True).copies_work_together
    found = {sizes.expert for sizes in legal_layouts(EXPERTS, 6)}
    assert found == {1, 2, 3, 6}


def test_heads_are_exchanged_as_far_as_they_go():
    assert ParallelSizes(context=4, context_comm="both").head_exchange_size(6) == 2
    assert ParallelSizes(context=2, context_comm="both").head_exchange_size(6) == 2
    assert ParallelSizes(context=4, context_comm="ring").head_exchange_size(8) == 1
    assert ParallelSizes(context=4, tensor=2).head_exchange_size(8) == 4


@pytest.mark.parametrize("ranks", [1, 7, 8, 12])
def test_every_listed_layout_is_legal_and_none_is_listed_twice(ranks):
    found = list(legal_layouts(MODEL, ranks))
    assert found and len(set(found)) == len(found)
    assert all(sizes.check(MODEL, ranks) * sizes.model_parallel_size == ranks for sizes in found)


def test_the_named_layout_works():
    with pytest.raises(UserError) as error:
        ParallelSizes(tensor=4, context=2).check(MODEL, 8)
    changed = dict(re.findall(r"(parallel\.\w+)=(\w+)", str(error.value).partition("ranks: ")[2]))
    fields = {name: changed[setting] for name, setting in SETTINGS.items() if setting in changed}
    sizes = {name: int(value) if value.isdigit() else value for name, value in fields.items()}
    assert ParallelSizes(**{"tensor": 4, "context": 2, **sizes}).is_legal(MODEL, 8)
