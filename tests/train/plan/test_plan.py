"""What a layout holds, sends and takes, and which one is chosen."""

import re
from dataclasses import replace

import numpy as np
import pytest

from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.flops import training_flops
from megadit.models.shared.errors import UserError
from megadit.models.shared.resources import GIB
from megadit.models.storage.components import network_shapes
from megadit.train.__main__ import main
from megadit.train.config.distill import DistillConfig
from megadit.train.config.load import resolve_config
from megadit.train.plan.estimate import estimate_step
from megadit.train.plan.hardware import GPUS, find_gpu
from megadit.train.plan.layout import Layout
from megadit.train.plan.memory import memory_of, with_recompute
from megadit.train.plan.report import plan
from megadit.train.plan.search import assess, rank_layouts, usable_memory
from megadit.train.plan.work import count_parameters, typical_pack, upstream_flops, work_of
from megadit.train.recipes import load_recipe
from tests.bundles import CONFIG, write_tiny_bundle

H100 = find_gpu("h100-80gb")


def layout(gpus=256, **settings):
    return Layout(gpus=gpus, **{"global_batch_size": 256, **settings})


@pytest.mark.parametrize("name", ["digits", "dit_xl", "dit_28b"])
def test_every_parameter_is_counted_once(name):
    total = sum(np.prod(shape) for shape in network_shapes(NAMED_CONFIGS[name]).values())
    assert count_parameters(NAMED_CONFIGS[name]).total == total


def test_tensor_parallelism_splits_attention_and_mlp_of_the_blocks():
    model = NAMED_CONFIGS["dit_7b"]
    D, M = model.hidden_size, model.mlp_size
    assert count_parameters(model).split == model.num_layers * (4 * D * D + 4 * D * D + 2 * D * M)


def test_work_of_all_ranks_is_the_work_of_the_run():
    run = load_recipe("performance_28b_8k")
    own = Layout.of(run, 256)
    assert (own.tensor, own.pipeline, own.data, own.num_micro_batches) == (4, 4, 16, 16)
    pack = typical_pack(run)
    step = work_of(run, own).flops * own.num_micro_batches * own.gpus
    assert step == pytest.approx(training_flops(pack, run.model) * run.data.global_batch_size, rel=1e-9)


def test_stages_send_the_activations_of_a_teacher_beside_the_students():
    run = load_recipe("digits_tiny")
    parallel = replace(run.parallel, pipeline_model_parallel_size=2)
    run = replace(run, parallel=parallel, diffusion=replace(run.diffusion, learned_uncertainty=False))
    students = [
        DistillConfig(teacher="nowhere", objective="diffusion_nft"),
        DistillConfig(teacher="nowhere", objective="regression", sigmas=(80.0, 1.0)),
    ]
    runs = [run, *(replace(run, train=replace(run.train, distill=student)) for student in students)]
    plain, *of_students = (work_of(one, Layout.of(one, 2)).pipeline_bytes for one in runs)
    assert of_students == [2 * plain, plain] and plain > 0


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("performance_7b_8k_baseline", 7.17),
        ("performance_7b_8k", 7.17),
        ("performance_7b_74k", 7.17),
        ("performance_28b_8k", 28.26),
        ("performance_28b_64k", 28.26),
    ],
)
def test_networks_of_the_published_rows_have_their_size(name, billions):
    """NeMo's `DiTCrossAttentionModel7B` and 28B, counted in its own code; ours of these names have 7.59 and 30.36."""
    model = load_recipe(name).model
    assert count_parameters(model).total / 1e9 == pytest.approx(billions, rel=0.005)
    assert count_parameters(replace(model, family="megadit")).total / 1e9 != pytest.approx(billions, rel=0.05)


def test_published_formula_gives_the_published_figure():
    """519 TFLOP/s at 10,052 tokens/s/GPU, 439 at 3,409, 468 at 2,510, 445 at 1,386."""
    for name, tflops, tokens in (
        ("performance_7b_8k", 519, 10_052),
        ("performance_7b_74k", 439, 3_409),
        ("performance_28b_8k", 468, 2_510),
        ("performance_28b_64k", 445, 1_386),
    ):
        run = load_recipe(name)
        flops_of_token = upstream_flops(run) / (run.data.global_batch_size * run.data.seq_length)
        assert flops_of_token * tokens / 1e12 == pytest.approx(tflops, rel=0.025)


def test_groups_are_disjoint_and_whole():
    groups = layout(gpus=24, tensor=2, context=3, pipeline=2, global_batch_size=2).groups()
    assert {name: group.shape for name, group in groups.items()} == {
        "tensor": (12, 2),
        "context": (8, 3),
        "data": (12, 2),
        "pipeline": (12, 2),
    }
    assert all(sorted(group.reshape(-1)) == list(range(24)) for group in groups.values())
    assert groups["tensor"][0].tolist() == [0, 1]
    assert groups["context"][0].tolist() == [0, 2, 4]
    assert groups["data"][0].tolist() == [0, 6]
    assert groups["pipeline"][0].tolist() == [0, 12]


def test_what_is_divided_shrinks_as_it_should():
    run = load_recipe("performance_7b_8k")
    whole = memory_of(run, layout(data_parallel="ddp"))
    spread = memory_of(run, layout(data_parallel="distributed_optimizer"))
    sharded = memory_of(run, layout(data_parallel="fsdp"))
    assert spread.optimizer == pytest.approx(whole.optimizer / 256)
    assert spread.gradients == whole.gradients
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(sharded, part) == pytest.approx(getattr(whole, part) / 256)
    cut = memory_of(run, layout(tensor=2, sequence_parallel=True))
    uncut = memory_of(run, layout(tensor=2))
    assert cut.activations < uncut.activations < whole.activations
    assert memory_of(run, layout(context=4)).activations < 0.3 * whole.activations
    assert memory_of(run, layout(recompute="full")).activations < 0.1 * whole.activations
    half = memory_of(run, layout(recompute="full", recompute_share=0.5))
    assert 0.5 * whole.activations < half.activations < 0.6 * whole.activations


def test_offloaded_activations_are_the_host_s_and_cost_what_is_not_hidden():
    """At 74,000 tokens a pack, attention takes longer than copies; at 8,192 it does not."""
    gpu = GPUS["h100-80gb"]
    for name, of_layout, is_hidden in (
        ("performance_7b_74k", layout(gpus=8, context=8), True),
        ("performance_7b_8k", layout(gpus=8), False),
    ):
        run = load_recipe(name)
        kept, offloaded = (replace(of_layout, offloaded_share=share) for share in (0.0, 0.5))
        before, after = memory_of(run, kept), memory_of(run, offloaded)
        assert before.offloaded == 0 and before.activations - after.activations == pytest.approx(after.offloaded)
        assert 0.4 * before.activations < after.offloaded < 0.5 * before.activations
        assert after.total < before.total - 0.8 * after.offloaded, "two blocks' pass through the GPU"
        assert estimate_step(run, kept, gpu).offloading == 0
        waited = estimate_step(run, offloaded, gpu)
        assert (waited.offloading == 0) == is_hidden and waited.total >= estimate_step(run, kept, gpu).total
        slower = estimate_step(run, offloaded, replace(gpu, host_bandwidth=gpu.host_bandwidth / 100))
        assert slower.offloading > waited.offloading


def test_a_run_offloads_blocks_that_are_not_recomputed(capsys):
    command = ["--recipe", "performance_7b_8k", "--dry-run", "--gpus", "8", "--gpu", "h200-141gb"]
    assert main([*command, "parallel.cpu_offloading_num_layers=16"]) == 0
    assert "and of its host: " in capsys.readouterr().out
    both = ["parallel.recompute_granularity=full", "parallel.recompute_num_layers=24"]
    shares = [
        Layout.of(resolve_config("performance_7b_8k", overrides=[*more, f"parallel.cpu_offloading_num_layers={n}"]), 8)
        for more, n in (([], 16), (both, 4), (both, 16))
    ]
    assert [each.offloaded_share for each in shares] == [0.5, 0.125, 0.25]
    assert main([*command, "parallel.cpu_offloading_num_layers=16", both[0]]) == 2
    assert "set parallel.recompute_num_layers, or leave one out" in capsys.readouterr().err


def test_the_published_out_of_memory_row_is_refused_with_its_number(capsys):
    command = ["--recipe", "performance_7b_8k_baseline", "--dry-run", "--gpus", "256", "--gpu", "h100-80gb"]
    assert main(command) == 2
    told = re.search(r"needs (\d+) GiB on each GPU and h100-80gb has 75 usable", capsys.readouterr().err)
    assert int(told[1]) > 80
    assert main([*command[:-1], "gb200-186gb"]) == 0  # there is a GPU for it


def test_every_other_published_row_fits():
    for name in ("performance_7b_8k", "performance_7b_74k", "performance_28b_8k", "performance_28b_64k"):
        assert assess(load_recipe(name), Layout.of(load_recipe(name), 256), H100).fits


def test_all_ranked_layouts_are_legal_in_order_and_different():
    run = load_recipe("pretrain_7b_pack")
    choices = rank_layouts(run, 32, H100)
    assert len({choice.layout for choice in choices}) == len(choices) > 300
    fitting = [choice for choice in choices if choice.fits]
    assert choices[: len(fitting)] == fitting
    times = [choice.time.total for choice in fitting]
    assert times == sorted(times)
    for choice in choices[::97]:
        changed = resolve_config("pretrain_7b_pack", overrides=choice.layout.overrides())
        assert Layout.of(changed, 32) == choice.layout


def test_plan_says_the_best_layout_why_and_what_does_not_fit(capsys):
    command = ["--recipe", "performance_7b_8k_baseline", "--plan", "--gpus", "64", "--gpu", "h100-80gb"]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "refused: it needs 150 GiB" in told
    assert "tokens/s/GPU" in told
    assert "why data_parallel=" in told
    best = re.findall(r"^    ([a-z_.]+=\S+)$", told, re.MULTILINE)
    config = resolve_config("performance_7b_8k_baseline", overrides=best)
    assert memory_of(config, Layout.of(config, 64)).total < usable_memory(H100)


def test_no_layout_fits_is_told_with_the_least_memory():
    run = load_recipe("performance_28b_8k")
    with pytest.raises(UserError, match=r"no layout .* fits: the smallest, .*, needs \d+ GiB of \d+; take more GPUs"):
        plan(replace(run, data=replace(run.data, global_batch_size=8)), 4, find_gpu("a100-40gb"))


def test_a_batch_that_no_layout_divides_is_refused():
    run = load_recipe("performance_7b_8k")
    model = replace(run.model, num_layers=31, num_attention_heads=1)
    lonely = replace(run, model=model, parallel=type(run.parallel)(), data=replace(run.data, global_batch_size=3))
    with pytest.raises(UserError, match="data.global_batch_size=3"):
        plan(replace(lonely, data=replace(lonely.data, seq_length=8191, mock_latent_shapes=((1, 32, 32),))), 256, H100)


def test_shorter_steps_where_the_machine_is_faster():
    run = load_recipe("performance_7b_8k")
    own = Layout.of(run, 256)
    h100, b200 = (assess(run, own, find_gpu(name)).time.total for name in ("h100-80gb", "b200-180gb"))
    assert b200 < h100


def test_names_of_gpus_say_their_memory():
    for name, gpu in GPUS.items():
        assert name.endswith(f"-{gpu.memory / GIB:.0f}gb")


ADAPTER = (
    *("data.mock=true", "train.adapter.rank=16", "data.seq_length=8192", "data.text_seq_length=512"),
    *("data.global_batch_size=1", "data.micro_batch_size=1", "data.mock_latent_shapes=[[4,32,32],[1,32,32]]"),
    *("parallel.tensor_model_parallel_size=1", "parallel.context_parallel_size=1", "parallel.sequence_parallel=false"),
    *("parallel.data_parallel=ddp", "parallel.recompute_granularity=auto"),
)


def adapter_run(model="dit_7b", *more):
    return replace(resolve_config("pretrain_7b", overrides=[*ADAPTER, *more]), model=NAMED_CONFIGS[model])


@pytest.mark.parametrize(("model", "gpu"), [("dit_7b", "h100-80gb"), ("cosmos_14b", "h200-141gb")])
def test_an_adapter_of_a_large_network_fits_one_gpu_with_nothing_recomputed(model, gpu):
    run, gpu = adapter_run(model), find_gpu(gpu)
    decided = with_recompute(run, 1, gpu.memory)
    assert decided.parallel.recompute_granularity == "none"
    assert assess(decided, Layout.of(decided, 1), gpu).fits
    whole = replace(run, train=replace(run.train, adapter=None))
    assert not assess(whole, Layout.of(whole, 1), gpu).fits


def test_a_step_of_an_adapter_costs_less_than_a_step_of_its_network():
    """Of many samples; of a single one of 8,192 tokens attention, whose backward stays, is a quarter of all."""
    run = adapter_run()
    pack = typical_pack(run)
    share = training_flops(pack, run.model, run.train.adapter) / training_flops(pack, run.model)
    assert 2 / 3 < share < 0.72
    whole = replace(run, train=replace(run.train, adapter=None))
    ours, theirs = (work_of(one, Layout.of(one, 1)) for one in (run, whole))
    assert ours.flops == pytest.approx(share * theirs.flops)
    assert theirs.linear_share == pytest.approx(1 / 3) and 0.48 < ours.linear_share < 0.5
    assert ours.data_reduce_bytes == theirs.data_reduce_bytes == 0


def test_a_teacher_that_is_told_its_scale_is_asked_once(tmp_path):
    """As its bundle says; of one that is not at hand nothing is known."""
    write_tiny_bundle(tmp_path / "plain")
    write_tiny_bundle(tmp_path / "told", replace(CONFIG, guidance_embedding_range=(1.0, 6.0)))

    def linears(teacher: str) -> float:
        asked = DistillConfig(teacher=str(tmp_path / teacher), objective="guidance", guidance=3.0)
        run = load_recipe("digits")
        diffusion = replace(run.diffusion, learned_uncertainty=False)
        run = replace(run, diffusion=diffusion, train=replace(run.train, distill=asked))
        return work_of(run, Layout.of(run, 1)).linear_flops

    assert linears("absent") == linears("plain") == pytest.approx(linears("told") * (3 + 2) / (3 + 1))


def test_an_adapter_is_divided_as_its_linears_are():
    run = adapter_run()
    model, adapter = run.model, run.train.adapter
    count = count_parameters(model, adapter)
    D, M, r = model.hidden_size, model.mlp_size, adapter.rank
    # with q, k and v of two attentions and two projections, four times D; fc1 and fc2
    assert count.total == model.num_layers * r * (8 * 2 * D + 2 * (D + M))
    # of the columns up, of the rows down
    assert count.split == model.num_layers * r * (6 * D + M + 2 * D + M)
    assert count.of_rank(layout(tensor=2)) == count.total - count.split / 2


def test_a_dry_run_says_what_learns(capsys):
    assert main([*("--recipe", "pretrain_7b", "--dry-run", "--gpus", "1", "--gpu", "h100-80gb"), *ADAPTER]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"parameters: 7,\d{3},\d{3},\d{3}$", shown, re.MULTILINE)
    assert "parameters of the adapter, which alone are trained: 40,894,464\n" in shown
    assert re.search(r"recomputed: 0 of 32 blocks", shown)
