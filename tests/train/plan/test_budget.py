"""The budget of a step: the arithmetic of the 7B network on one H200, part by part, and what changes which part.

The figures compared with were worked out by hand for one pack of 8,192 tokens, from the rates that published kernels
reach; none was measured by this project.
"""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from megadit.models.ops.attention import has_few_long_groups
from megadit.train.__main__ import main
from megadit.train.config.load import resolve_config
from megadit.train.plan.budget import ATTENTION, budget
from megadit.train.plan.estimate import RING_ATTENTION, estimate_step
from megadit.train.plan.hardware import find_gpu, this_device
from megadit.train.plan.layout import Layout
from megadit.train.plan.memory import memory_of
from megadit.train.plan.work import attention_efficiency, count_parameters, typical_pack

H200 = find_gpu("h200-141gb")
ONE_PACK = ("data.mock=true", "data.global_batch_size=1", "data.micro_batch_size=1", "optimizer.optimizer=adamw")
BY_HAND = {
    "linears": 298,
    "self-attention (dense)": 180,
    "cross-attention": 18,
    "norm of the gradient": 8,
    "zeroing of gradients": 8,
    "adding of gradients": 19,
    "update": 42,
}
"""Milliseconds."""


OURS = ("model.family=megadit", "model.position_embedding=rope")
"""The audit counted our network of 7.59 billion; the recipe has NeMo's, which is smaller."""


def seven_billion(*overrides):
    config = resolve_config(
        "performance_7b_8k_baseline",
        overrides=[*ONE_PACK, *OURS, "ema.sigma_rels=[]", "optimizer.moments=bf16", *overrides],
    )
    return config, Layout.of(config, 1)


@cache
def parts(*overrides):
    return {part.name: part for part in budget(*seven_billion(*overrides), H200)}


@pytest.mark.parametrize("name", BY_HAND)
def test_parts_are_those_worked_out_by_hand(name):
    assert parts()[name].seconds * 1e3 == pytest.approx(BY_HAND[name], rel=0.06)


def test_the_sum_is_that_of_the_parts_and_nothing_beats_the_data_sheet():
    found = parts().values()
    assert all(part.seconds >= part.least >= 0 for part in found)
    assert 590e-3 < sum(part.seconds for part in found) < 660e-3
    flops = sum(part.flops for part in found)
    assert flops == pytest.approx(294e12, rel=0.03)  # 208 of linears, 79 + 5 of attention


def test_each_remedy_and_each_cost_is_in_its_part():
    plain = parts()
    assert "self-attention (varlen)" in parts("data.mock_latent_shapes=[[1,16,16]]")
    fused = parts("parallel.gradient_accumulation_fusion=true")
    assert fused["adding of gradients"].bytes == pytest.approx(0.4 * plain["adding of gradients"].bytes)
    assert "zeroing of gradients" not in fused
    by_engine = parts("parallel.gradient_accumulation_fusion=true", "parallel.transformer_impl=transformer_engine")
    assert by_engine["adding of gradients"].bytes == pytest.approx(0.8 * plain["adding of gradients"].bytes)
    wide = parts("optimizer.moments=fp32")
    assert {"division of gradients", "clipping", "copies of weights"} <= wide.keys() - plain.keys()
    again = parts("parallel.recompute_granularity=full")
    assert again["linears"].flops == pytest.approx(4 / 3 * plain["linears"].flops)
    assert again["gates"].bytes == pytest.approx(11 / 8 * plain["gates"].bytes)
    four = parts("data.global_batch_size=4")
    for name, times in {"linears": 4, "update": 1, "adding of gradients": 4, "zeroing of gradients": 1}.items():
        assert four[name].seconds == pytest.approx(times * plain[name].seconds), name


def test_a_cache_of_weights_in_eight_bits_takes_two_bytes_and_saves_casts():
    eight = ("train.fp8=hybrid", "data.global_batch_size=4")
    plain, cached = parts(*eight), parts(*eight, "train.fp8_weight_cache=true")
    weights = count_parameters(seven_billion()[0].model).split
    assert plain["casts of weights"].bytes == (2 + 4 * 6) * weights and cached["casts of weights"].bytes == 6 * weights
    of_memory = [memory_of(*seven_billion(*eight, f"train.fp8_weight_cache={is_on}")) for is_on in ("true", "false")]
    assert of_memory[0].total - of_memory[1].total == of_memory[0].parameters - of_memory[1].parameters == 2 * weights
    again = parts(*eight, "parallel.recompute_granularity=full")
    assert again["casts of weights"].bytes == (2 + 4 * 9) * weights
    assert "casts of weights" not in parts("data.global_batch_size=4")


def test_eight_bits_with_casts_are_as_fast_as_they_were_measured():
    plain, eight = parts(), parts("train.fp8=hybrid")
    gain = plain["linears"].seconds / (eight["linears"].seconds + eight["casts of weights"].seconds)
    assert gain == pytest.approx(1.1, rel=0.02)


def test_small_networks_wait_for_the_host():
    small = {part.name: part.seconds for part in budget(*seven_billion("model.hidden_size=768"), H200)}
    assert small["waiting for the host"] > 0 and parts()["waiting for the host"].seconds == 0


def test_dense_attention_is_for_few_long_samples():
    config, _ = seven_billion()
    pack = typical_pack(config)
    assert has_few_long_groups(pack)
    many = tuple((1, 2 * side, 16 * side) for side in (16, 12, 10, 8, 9))
    longer = replace(config, data=replace(config.data, mock_latent_shapes=many, seq_length=65536))
    assert not has_few_long_groups(typical_pack(longer)), "each length is a launch"
    short = replace(config, data=replace(config.data, mock_latent_shapes=((1, 8, 8),)))
    assert not has_few_long_groups(typical_pack(short))


def test_the_memory_of_a_7b_step_and_of_its_resume():
    """138 GB by hand, and 168 with float32 moments; a resume holds no more than the step."""
    config, layout = seven_billion()
    memory = memory_of(config, layout)
    assert memory.total == pytest.approx(138e9, rel=0.03)
    wide = memory_of(*seven_billion("optimizer.moments=fp32"))
    assert wide.total == pytest.approx(168e9, rel=0.03)
    resumed = memory.parameters + memory.gradients + memory.optimizer + memory.ema_weights
    assert resumed < min(memory.total, 145e9)


LAYERS, WIDTH, HIDDEN = 32, 3072, 12288
KEPT = 6 * WIDTH + 9 * WIDTH + HIDDEN
"""Numbers that a layer keeps of each token for its backward: six inputs of linears and what norms, gates and the two
attentions keep beside them, and the hidden ones of the MLP; two bytes each."""


@pytest.mark.parametrize(
    ("recipe", "gpus", "split", "sharing"),
    [
        ("performance_7b_8k_baseline", 1, 1, 1),
        ("performance_7b_8k", 8, 2, 4),
        ("performance_7b_8k", 64, 2, 32),
        ("performance_7b_74k", 8, 8, 4),
        ("performance_7b_74k", 64, 8, 32),
    ],
)
def test_memory_is_what_arithmetic_gives(recipe, gpus, split, sharing):
    """`split`: ranks that share activations; `sharing`: ranks that share what the optimizer keeps, 8 bytes a number."""
    config = resolve_config(recipe, overrides=["optimizer.optimizer=adamw", "optimizer.moments=bf16", "data.mock=true"])
    layout = Layout.of(config, gpus)
    memory, tensor = memory_of(config, layout), config.parallel.tensor_model_parallel_size
    numbers = count_parameters(config.model).total
    assert numbers == pytest.approx(7.167e9, rel=0.001)
    modulation = LAYERS * 9 * WIDTH**2  # whole on each tensor-parallel rank
    held = (numbers - modulation) / tensor + modulation
    assert memory.activations == pytest.approx(2 * KEPT * LAYERS * config.data.seq_length / split, rel=0.05)
    assert memory.parameters == pytest.approx(2 * held, rel=0.05)
    assert memory.gradients == pytest.approx(4 * held, rel=0.05)
    assert memory.optimizer == pytest.approx(8 * held / sharing, rel=0.05)


def test_a_pack_of_74k_on_one_card_is_what_arithmetic_gives():
    """Blocks are computed again: each keeps its input, and one at a time all else, with ten gradients of a token, as
    wide as the network, two bytes each."""
    sizes = ("tensor_model_parallel_size=1", "context_parallel_size=1", "sequence_parallel=false")
    overrides = [*(f"parallel.{size}" for size in sizes), "parallel.recompute_granularity=full", *ONE_PACK]
    config = resolve_config("performance_7b_74k", overrides=[*overrides, "optimizer.moments=bf16"])
    memory, numbers, tokens = memory_of(config, Layout.of(config, 1)), 7.167e9, 73_728
    assert memory.parameters + memory.gradients + memory.optimizer == pytest.approx((2 + 4 + 8) * numbers, rel=0.05)
    assert memory.activations == pytest.approx(2 * WIDTH * LAYERS * tokens, rel=0.05)
    assert memory.passing == pytest.approx(2 * (KEPT + 10 * WIDTH) * tokens, rel=0.05)
    assert memory.total == pytest.approx(128.1e9, rel=0.05), "it fits on an H200"


def test_exchanged_heads_are_planned_at_the_rate_of_whole_samples():
    overrides = ["optimizer.optimizer=adamw", "data.mock=true"]
    heads = resolve_config("performance_7b_74k", overrides=overrides)
    ring = resolve_config("performance_7b_74k", overrides=[*overrides, "parallel.context_parallel_comm=ring"])
    of_ring, of_heads = ({part.name for part in budget(run, Layout.of(run, 64), H200)} for run in (ring, heads))
    assert "self-attention (varlen)" in of_ring and "self-attention (dense)" in of_heads
    times = [estimate_step(run, Layout.of(run, 64), H200) for run in (ring, heads)]
    efficiency = attention_efficiency(typical_pack(ring), ring.model, 4) / attention_efficiency(
        typical_pack(heads), heads.model, 1
    )  # a quarter of a sample at a time
    assert 0.95 < efficiency < 1
    assert times[1].attention == pytest.approx(RING_ATTENTION * efficiency * times[0].attention)
    assert times[1].total < 0.8 * times[0].total, "so a plan prefers it"


def test_short_samples_and_odd_heads_slow_attention_down():
    """Rates of the H100 at 8,192 and 1,024 tokens, in heads of 128: 435 and 269 TFLOP/s by cuDNN, 261 and 156 for
    packs."""
    run, _ = seven_billion()
    whole, eight = (
        replace(run, data=replace(run.data, mock_latent_shapes=((1, 64, side),), seq_length=8192)) for side in (512, 64)
    )
    long, short = (attention_efficiency(typical_pack(each), each.model, 1) for each in (whole, eight))
    for kernel, measured in {"dense": (435, 269), "varlen": (261, 156)}.items():
        found = [ATTENTION[kernel] * share * 989 for share in (long, short)]
        assert found == pytest.approx(measured, rel=0.03)
    odd = replace(run.model, head_dim=72)
    assert attention_efficiency(typical_pack(whole), odd, 1) == pytest.approx(72 / 96 * long)
    on_cpu = replace(H200, is_cpu=True)
    times = [estimate_step(each, Layout.of(each, 1), on_cpu).attention for each in (whole, eight)]
    assert times[0] / times[1] == pytest.approx(8, rel=0.1), "as many operations more"


def test_a_card_is_known_by_its_name(monkeypatch):
    names = {"NVIDIA H100 80GB HBM3": "h100-80gb", "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000-96gb",
             "NVIDIA B300 SXM6": "b300-288gb", "NVIDIA A100-SXM4-40GB": "a100-40gb"}  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for found, known in names.items():
        of_card = SimpleNamespace(name=found, total_memory=find_gpu(known).memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, of_card=of_card: of_card)
        assert this_device(1).name == known


def test_it_is_printed(capsys):
    command = ["--recipe", "performance_7b_8k_baseline", "--plan", "--gpus", "64", "--gpu", "h100-80gb"]
    overrides = [
        "optimizer.optimizer=adamw",
        "parallel.tensor_model_parallel_size=2",
        "parallel.sequence_parallel=true",
    ]
    assert main([*command, "--explain", *overrides]) == 0
    told = capsys.readouterr().out
    assert "sent and waited for: tensor" in told and "linears" in told and "tokens/s/GPU" in told
    assert "75 GiB usable" in told and "does not fit" in told
    assert main([*command[:-1], "gb200-186gb", "--explain", *overrides]) == 0
    assert "does not fit" not in capsys.readouterr().out
    assert main(["--recipe", "digits", "--plan", "--gpus", "1", "--gpu", "h100-80gb", "--explain"]) == 0
    [linears] = [line for line in capsys.readouterr().out.splitlines() if "linears" in line]
    assert all(float(number) > 0 for number in linears.split()[1:]), "what is little is told too"
    assert main(["--recipe", "digits", "--explain"]) == 2
    assert "--explain belongs to --plan" in capsys.readouterr().err
