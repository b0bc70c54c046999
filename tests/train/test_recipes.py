"""Every recipe is complete, and the command shows it without training."""

import re
from dataclasses import replace

import pytest
import yaml

from megadit.models.configs.block import ExpertConfig
from megadit.models.configs.named import NAMED_CONFIGS
from megadit.models.shared.errors import UserError
from megadit.models.shared.resources import GIB
from megadit.train.__main__ import main
from megadit.train.config.load import config_from_dict
from megadit.train.config.rules import check_layout
from megadit.train.plan.layout import Layout
from megadit.train.plan.memory import memory_of
from megadit.train.recipes import RECIPES, load_recipe
from megadit.train.recipes.registry import variant

MILLION = 10**6
RUNS = {name: load_recipe(name) for name in RECIPES}


def test_recipes_bear_their_names_and_say_what_they_need():
    for name, run in RUNS.items():
        assert run.recipe == name
        for heading in ("Command: ", "Hardware: ", "Tokens: ", "Memory: "):
            assert heading in RECIPES[name].__doc__, name


def test_recipes_run_on_mock_data_alone():
    for name in RECIPES:
        run = variant(load_recipe(name), data={"mock": True})  # its mock samples fit into its packs
        sizes = run.parallel.sizes
        assert check_layout(run, sizes.smallest_world) == sizes.smallest_world // sizes.model_parallel_size, name


def test_recipes_divide_among_the_ranks_of_their_commands():
    for name, run in RUNS.items():
        check_layout(run, ranks_of_command(name))


def test_heads_are_exchanged_where_they_divide():
    """Ranks then attend to whole samples; a ring's kernel is slower."""
    for name, run in RUNS.items():
        sizes = run.parallel.sizes
        if sizes.context > 1 and run.model.num_attention_heads % (sizes.tensor * sizes.context) == 0:
            assert run.parallel.context_parallel_comm == "ulysses", name


def test_memory_of_the_docstring_is_the_planner_s():
    for name, run in RUNS.items():
        told = float(re.search(r"Memory: ([\d.]+) GiB", RECIPES[name].__doc__)[1])
        needed = memory_of(run, Layout.of(run, ranks_of_command(name))).total / GIB
        assert told == pytest.approx(needed, rel=0.1), name


@pytest.mark.parametrize(
    ("name", "before"),
    [
        *((f"stage2_{size}_8k", f"stage1_{size}_256") for size in ("7b", "5b", "30b")),
        *((f"stage3_{size}_74k", f"stage2_{size}_8k") for size in ("7b", "5b", "30b")),
        ("image_xl_512", "image_xl_256"),
        ("image_digits_64", "image_digits"),
        ("dreambooth", None),
    ],
)
def test_a_recipe_that_starts_from_another_run_takes_its_weights_alone(name, before):
    """checkpoint.load would continue that run: its count of steps, and its packs, which have another size."""
    assert "checkpoint.init_from=RUN" in RECIPES[name].__doc__ and "checkpoint.load" not in RECIPES[name].__doc__
    if before is not None:
        run, earlier = load_recipe(name), load_recipe(before)
        assert replace(run.model, rope_interpolation=(1.0, 1.0, 1.0)) == earlier.model
        assert run.data.mock_latent_shapes != earlier.data.mock_latent_shapes


def ranks_of_command(name):
    """Nodes x ranks of the torchrun command that the docstring gives."""
    command = RECIPES[name].__doc__
    nodes, ranks = (re.search(rf"{option} (\d+)", command) for option in ("--nnodes", "--nproc-per-node"))
    return int(nodes[1] if nodes else 1) * int(ranks[1] if ranks else 1)


def test_tokens_of_the_docstring_are_those_of_the_recipe():
    for name, run in RUNS.items():
        text = re.search(r"Tokens: ([\d,.]+)( million)? a step", RECIPES[name].__doc__)
        told = float(text[1].replace(",", "")) * (MILLION if text[2] else 1)
        assert told == pytest.approx(run.data.seq_length * run.data.global_batch_size, rel=0.05), name


@pytest.mark.parametrize("name", {recipe.__module__: name for name, recipe in RECIPES.items()}.values())
def test_dry_run_at_full_size_prints_a_configuration_and_what_it_costs(name, capsys):
    assert main(["--recipe", name, "--print-config", "--dry-run", "--gpus", str(ranks_of_command(name))]) == 0
    shown = capsys.readouterr().out
    assert config_from_dict(yaml.safe_load(shown)) == load_recipe(name)
    assert re.search(r"^# parameters: [\d,]+$", shown, re.MULTILINE)
    for line in ("layout on", "memory of a rank:", "FLOPs of a step:", "sent by a rank in a step:"):
        assert line in shown


@pytest.mark.parametrize(
    ("name", "low", "high"), [("digits", 0.5, 2), ("pretrain_xl", 600, 1000), ("pretrain_7b", 6500, 8000)]
)
def test_parameter_counts_are_those_of_the_sizes(name, low, high, capsys):
    main(["--recipe", name, "--dry-run"])
    count = int(re.search(r"parameters: ([\d,]+)", capsys.readouterr().out)[1].replace(",", ""))
    assert low * MILLION < count < high * MILLION


NEMO = {
    "pretrain_xl": ("dit_xl", 2048, 1, 32, {}),
    "pretrain_l": ("dit_l", 2048, 1, 32, {}),
    "train_mock": ("moviegen_5b", 73_728, 1, 1, {"tensor": 4, "context": 2, "fully_sharded": True}),
    "mock_ditllama5b_8k": ("moviegen_5b", 8192, 1, 32, {"tensor": 2, "fully_sharded": True}),
    "mock_dit7b_8k": ("dit_7b", 8192, 1, 32, {"tensor": 2, "fully_sharded": True}),
    "pretrain_7b": ("dit_7b", 260, 9, 4608, {}),
    "pretrain_7b_pack": ("dit_7b", 2304, 1, 512, {}),
    "pretrain_7b_256p_joint": ("dit_7b", 8192, 1, 256, {"tensor": 2}),
    "pretrain_7b_256p_joint_pack": ("dit_7b", 10_240, 1, 128, {"tensor": 2}),
    "pretrain_ditllama5b": ("moviegen_5b", 260, 12, 4608, {}),
    "pretrain_ditllama30b": ("moviegen_30b", 256, 6, 9216, {"fully_sharded": True}),
    "pretrain_ditllama30b_stage2_mock": (
        *("moviegen_30b", 8192, 1, 256),
        {"tensor": 2, "context": 4, "fully_sharded": True},
    ),
    "pretrain_ditllama30b_stage3_mock": (
        *("moviegen_30b", 73_728, 1, 256),
        {"tensor": 2, "context": 8, "fully_sharded": True},
    ),
    "pretrain_ditllama5b_stage3_mock_with_pp": (
        *("moviegen_5b", 8192, 1, 1),
        {"tensor": 2, "context": 2, "pipeline": 2},
    ),
    "pretrain_ditllama30b_stage3_mock_with_pp": (
        *("moviegen_30b", 73_728, 1, 256),
        {"tensor": 4, "context": 8, "pipeline": 4},
    ),
    "pretrain_ditllama1b": ("moviegen_1b", 256, 96, 1536, {}),
    "pretrain_ditllama3b": ("moviegen_3b", 256, 48, 1536, {}),
    "pretrain_ecditllama1b": ("moviegen_1b", 256, 72, 2304, {"fully_sharded": True}),
    "dreambooth": ("dit_s", 2048, 1, 32, {"tensor": 2}),
    **dict.fromkeys(("wan_1_3b_pretrain_config", "wan_1_3b_sft_config"), ("wan_1_3b", 32_768, 1, 2, {"context": 8})),
    **dict.fromkeys(
        ("wan_14b_pretrain_config", "wan_14b_sft_config"), ("wan_14b", 32_768, 1, 1, {"tensor": 2, "context": 4})
    ),
}
"""Recipes of Megatron-Bridge (`wan_*`, with our packs) and factories of NeMo 2.1's `train.py`: network, tokens of a
pack, packs of a micro-batch and of a batch, layout (of `dreambooth`, whose heads its 8 ranks cannot share, ours).
ST-DiT's, of a branch never merged, is tested apart."""
CHANGED = {"mock_dit7b_8k": {"family": "nemo"}, "train_mock": {"num_layers": 16, "learned_positions": (1, 120, 120)}}
"""Of the named network."""


def test_nemos_factories_have_their_numbers():
    for name, (network, *numbers, layout) in NEMO.items():
        run = RUNS[name]
        expected = replace(NAMED_CONFIGS[network], **CHANGED.get(name, {}))
        assert replace(run.model, experts=ExpertConfig()) == expected, name
        data, sizes = run.data, run.parallel.sizes
        assert [data.seq_length, data.micro_batch_size, data.global_batch_size] == numbers, name
        expected = {"tensor": 1, "context": 1, "pipeline": 1, "fully_sharded": False} | layout
        assert {axis: getattr(sizes, axis) for axis in expected} == expected, name
        assert sizes.sequence_parallel == (sizes.tensor > 1), name


def test_numbers_of_experts_and_of_st_dit():
    experts = load_recipe("pretrain_ecditllama1b").model.experts
    assert experts == ExpertConfig(num_experts=64, routing="expert_choice", capacity_factor=8.0, ffn_hidden_size=1024)
    mock = load_recipe("pretrain_stdit3B_mock_data")
    assert (mock.model, mock.data.seq_length, mock.train.train_iters) == (NAMED_CONFIGS["st_dit_3b"], 1024, 15)
    assert mock.parallel.tensor_model_parallel_size == 4 and mock.parallel.sequence_parallel


def test_overrides_may_stand_anywhere(capsys):
    assert main(["train.seed=5", "--recipe", "digits", "optimizer.lr=0.5", "--mock", "--print-config"]) == 0
    shown = config_from_dict(yaml.safe_load(capsys.readouterr().out))
    assert (shown.train.seed, shown.optimizer.lr, shown.data.mock) == (5, 0.5, True)


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'digits'"):
        load_recipe("digts")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--recipe", "digts"], "did you mean 'digits'"),
        (["--recipe"], "expected one argument"),
        (["--recipe", "digits", "--dryrun"], "did you mean '--dry-run'?"),
        (["--recipe", "digits", "--nproc", "two"], "invalid int value: 'two'"),
        (["--recipe", "digits", "--nproc", "0"], "--nproc=0 must be at least 1"),
        (["--recipe", "digits", "--plan"], "--plan needs --gpus N and --gpu NAME"),
        (["--recipe", "digits", "--plan", "--gpus", "4", "--gpu", "h100-80"], "did you mean 'h100-80gb'"),
        (["--recipe", "digits", "--mock", "--gpus", "4"], "belong to --plan and --dry-run"),
        (["--recipe", "digits", "--mock", "--nproc", "3"], "use 3"),
        (["--recipe", "digits"], "data.path is not set"),
        (["--recipe", "digits", "--dataset-path", "/nowhere"], "data.path=/nowhere"),
        (["--recipe", "digits", "--mock", "train.train_iters=0"], "train.train_iters=0 must be greater than 0"),
        (["--recipe", "digits", "--config-file", "nowhere.yaml"], "nowhere.yaml does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv, message, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_other_ranks_leave_the_error_to_the_first(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert main(["--recipe", "digts"]) == 2
    assert not capsys.readouterr().err


def test_debug_shows_the_traceback():
    with pytest.raises(UserError):
        main(["--recipe", "digts", "--debug"])
