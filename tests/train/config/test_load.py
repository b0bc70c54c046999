"""Recipe < YAML file < a.b=c, merged strictly."""

import dataclasses
import json
import math
import os
import re
import types
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise, product
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml

from megadit.infer.inspect.info import _read_run_config, describe_blend
from megadit.models.configs.config import TextTowerConfig
from megadit.models.shared.documents import OLD_NUMBERS
from megadit.models.shared.errors import UserError
from megadit.train.config.compat import FIXED, KEYS, NOT_NEEDED, SECTIONS, STARTED_BY_TORCHRUN
from megadit.train.config.distill import DistillConfig
from megadit.train.config.load import change, config_from_dict, config_keys, load_config, resolve_config, to_yaml
from megadit.train.config.schema import RunConfig
from megadit.train.recipes import load_recipe
from megadit.train.slurm.config import ChainConfig
from tests.bundles import write_tiny_bundle


def write(path, text: str):
    path.write_text(text)
    return path


@pytest.mark.parametrize("overrides", [["train=3", "train.seed=1"], ["train.seed=1", "train={train_iters: 9}"],
                                       ["data.path=a", "data.path.b=1"]])  # fmt: skip
def test_no_override_undoes_another(overrides):
    """OmegaConf would keep the last of them alone, and train with defaults in place of the others."""
    for given in (overrides, overrides[::-1]):
        with pytest.raises(UserError, match="cannot be set to .* beside"):
            resolve_config("digits", overrides=given)


def test_later_wins(tmp_path):
    file = write(tmp_path / "run.yaml", "train: {train_iters: 7, seed: 8}\noptimizer: {lr: 0.5}")
    run = resolve_config("digits", config_file=file, overrides=["train.seed=9"])
    assert (run.train.train_iters, run.train.seed, run.optimizer.lr) == (7, 9, 0.5)
    assert run.data == resolve_config("digits").data


def test_file_may_name_the_recipe(tmp_path):
    file = write(tmp_path / "run.yaml", "recipe: digits_tiny\ntrain: {seed: 8}")
    assert resolve_config(config_file=file).recipe == "digits_tiny"
    with pytest.raises(UserError, match="--recipe digits but .* says recipe: digits_tiny"):
        resolve_config("digits", config_file=file)


def test_some_recipe_must_be_named(tmp_path):
    with pytest.raises(UserError, match="no recipe"):
        resolve_config()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_layer=3", "unknown key model.num_layer; did you mean model.num_layers?"),
        ("optimizer.train_iters=3", "did you mean train.train_iters?"),
        ("lr=1", "unknown key lr; did you mean optimizer.lr?"),
        ("zzz=1", "unknown key zzz; see --print-config"),
        ("train.train_iters=1.5", "train.train_iters=1.5 is float, expected int"),
        ("train.train_iters=many", "train.train_iters='many' is str, expected int"),
        ("train.train_iters=true", "train.train_iters=True is bool, expected int"),
        ("train.train_iters=null", "train.train_iters=None is NoneType, expected int"),
        ("train.train_iters.x=1", "expected int"),
        ("data.mock=1", "data.mock=1 is int, expected bool"),
        ("data.path=12", "data.path=12 is int, expected str; quote it"),
        ("train.precision=bf61", "did you mean 'bf16'? choose one of fp32, bf16, fp16"),
        ("ema.sigma_rels=0.1", "ema.sigma_rels is a list; write ema.sigma_rels=[...]"),
        ("ema.sigma_rels=[0.1,a]", "ema.sigma_rels='a' is str, expected float"),
        ("data.mock_latent_shapes=[[1,2]]", "expected tuple[int, int, int]"),
        ("model=3", "model holds several keys"),
        ("train.seed=${data.nope}", "data.nope"),
        ("train.seed=[1", "cannot read"),
        ("train.seed", "write section.key=value"),
        ("+train.seed=1", "would add or delete a key"),
    ],
)
def test_a_bad_override_is_explained_in_one_line(override, message):
    with pytest.raises(UserError) as error:
        resolve_config("digits", overrides=[override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("optimizer.lr=1", lambda run: run.optimizer.lr, 1.0),
        ("optimizer.lr=8e-3", lambda run: run.optimizer.lr, 8e-3),
        ("train.num_threads=null", lambda run: run.train.num_threads, None),
        ("train.num_threads=3", lambda run: run.train.num_threads, 3),
        ("ema.sigma_rels=[]", lambda run: run.ema.sigma_rels, ()),
        ("ema.sigma_rels=[0.1, 0.2]", lambda run: run.ema.sigma_rels, (0.1, 0.2)),
        ("data.mock_latent_shapes=[[1,4,4]]", lambda run: run.data.mock_latent_shapes, ((1, 4, 4),)),
        ("data.path=/a/b=c", lambda run: run.data.path, "/a/b=c"),
        ("train.seed=${train.train_iters}", lambda run: run.train.seed, load_recipe("digits").train.train_iters),
        ("train.seed=${data.seq_length}", lambda run: run.train.seed, load_recipe("digits").data.seq_length),
        ("validation.prompts=['a red seven, moving']", lambda run: run.validation.prompts, ("a red seven, moving",)),
    ],
)
def test_values_arrive_as_their_types(override, read, expected):
    value = read(resolve_config("digits", overrides=[override]))
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [("- 1\n- 2", "not a list"), ("train: {", "not valid YAML"), ("train: {sed: 3}", "did you mean train.seed?")],
)
def test_a_bad_file_is_explained(tmp_path, text, message):
    with pytest.raises(UserError) as error:
        resolve_config("digits", config_file=write(tmp_path / "run.yaml", text))
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"config file \. is not a file; give the path"):
        resolve_config("digits", config_file=".")
    with pytest.raises(UserError, match=r"nowhere\.yaml does not exist"):
        resolve_config("digits", config_file=tmp_path / "nowhere.yaml")


def test_saved_configuration_reads_back(tmp_path):
    run = resolve_config("digits", overrides=["train.seed=9", "model.head_dim=12"])
    assert load_config(write(tmp_path / "config.yaml", to_yaml(run))) == run
    assert resolve_config(config_file=tmp_path / "config.yaml") == run


def test_a_saved_configuration_looks_nothing_up(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "seen")
    text = to_yaml(resolve_config("digits", overrides=["train.output_dir=here"]))
    path = write(tmp_path / "config.yaml", text.replace("output_dir: here", "output_dir: ${oc.env:SECRET}"))
    assert load_config(path).train.output_dir == "${oc.env:SECRET}"
    with pytest.raises(UserError, match="refers to something outside the file"):  # it may be another's run
        resolve_config(config_file=path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("- 1", "not a list"), ("a: &b [1]\nc: *b", "valid YAML|aliases|\\*b"), ("a: {", "not valid YAML")],
)
def test_a_damaged_saved_configuration_is_told(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load_config(write(tmp_path / "config.yaml", text))


def test_incomplete_dictionary_names_what_is_missing():
    values = dataclasses.asdict(resolve_config("digits"))
    del values["train"]["train_iters"]
    with pytest.raises(UserError, match=r"train\.train_iters is missing"):
        config_from_dict(values)


SPECIAL = {
    "diffusion.p_mean": 1.0,  # whose logarithm of the exponential is exact
    "optimizer.lr_decay_iters": 2000,
    "optimizer.min_lr": 1e-4,
    "optimizer.adam_beta1": 0.5,
    "validation.sampling.sampler": "heun",
    "validation.sampling.schedule": "linear",
    "validation.sampling.churn_interval": [0.5, 2.0],
    "validation.sampling.guidance_interval": [0.5, 2.0],
    "validation.sampling.adapter_interval": [0.5, 2.0],
    "validation.sampling.image_guidance": 2.0,
    "data.conditioning": ["first_frame:0.5"],
    "validation.sigmas": [2.0],
    "validation.extractors": ["classifier.safetensors"],
    "model.family": "nemo",
    "model.text_tower.num_words": 600,
    "model.guidance_embedding_range": [1.0, 9.0],
    "model.num_query_groups": 1,
    "model.hidden_size": 192,
    "model.num_attention_heads": 2,
    "model.head_dim": 12,
    "data.mock_latent_shapes": [[2, 4, 4]],
    "ema.sigma_rels": [0.2],
    "train.adapter.targets": ["blocks.*.fc1"],
    "train.distill.sigmas": [80.0, 1.0],
    "train.distill.guidance": 3.0,
    "train.distill.adversarial_weight": 0.1,
    "train.distill.teacher": "elsewhere",
}
"""Another legal value where it cannot be guessed."""
EXPERTS = ["optimizer.optimizer=adamw", "model.experts.num_experts=4"]
SECOND = ["validation.sampling.second_prompt=a blue two", "validation.sampling.second_guidance=2.0"]
STUDENT = [
    *("train.distill.teacher=nowhere", "train.distill.objective=guidance", "train.distill.sigmas=[80.0]"),
    "diffusion.learned_uncertainty=false",
]
CLASSIFYING = [
    *("model.family=vit", "model.num_classes=5", "model.crossattn_emb_size=2", "data.text_dropout=0"),
    *("model.position_embedding=learned", "model.learned_positions=[1,4,4]", "diffusion.learned_uncertainty=false"),
]
MATCHING = [
    *("model.family=clip", "model.text_tower.num_layers=1", "model.crossattn_emb_size=2", "data.text_dropout=0"),
    *("model.position_embedding=learned", "model.learned_positions=[1,4,4]", "diffusion.learned_uncertainty=false"),
]
TEXT_TOWER = [field.name for field in fields(TextTowerConfig)]
STUDENT_SETTINGS = [field.name for field in fields(DistillConfig)]
NEEDS = {
    "model.experts.num_experts": ["optimizer.optimizer=adamw"],
    "parallel.expert_model_parallel_size": EXPERTS,
    "parallel.expert_tensor_parallel_size": [
        *EXPERTS,
        "parallel.tensor_model_parallel_size=2",
        "parallel.sequence_parallel=true",
    ],
    "parallel.virtual_pipeline_model_parallel_size": ["parallel.pipeline_model_parallel_size=2"],
    "parallel.sequence_parallel": ["parallel.tensor_model_parallel_size=2"],
    "parallel.recompute_num_layers": ["parallel.recompute_granularity=full"],
    "parallel.cuda_graph_max_segments": ["train.precision=bf16", "parallel.overlap_param_gather=false"],
    **{f"train.adapter.{name}": ["train.adapter.rank=4"] for name in ("rank", "alpha", "targets", "dropout", "kind")},
    "train.base_precision": ["train.adapter.rank=4"],
    **{f"validation.sampling.{name}": ["validation.sampling.sampler=euler"] for name in ("eta", "churn")},
    **{f"train.distill.{name}": STUDENT for name in STUDENT_SETTINGS},
    "train.distill.adversarial_weight": [*STUDENT, "train.distill.objective=distribution_matching"],
    "train.distill.teacher_adapter": [*STUDENT, "train.adapter.rank=4"],
    "train.precision": ["optimizer.optimizer=adamw"],
    "train.contrast_rows": MATCHING,
    "model.quick_gelu": MATCHING,
    **{f"model.text_tower.{name}": MATCHING for name in TEXT_TOWER},
    "train.label_smoothing": CLASSIFYING,
    "data.mixup": CLASSIFYING,
    "train.fp8": ["train.precision=bf16", "parallel.transformer_impl=transformer_engine", "model.hidden_size=128"],
    "train.fp8_weight_cache": ["train.precision=bf16", "train.fp8=hybrid", "model.hidden_size=128"],
    "data.conditioning": ["model.conditioning_sigma=0.02"],
    "model.conditioning_mode": ["model.conditioning_sigma=0.02"],
    "optimizer.moments": ["optimizer.optimizer=adamw"],
    "model.family": ["model.hidden_size=256", "model.position_embedding=sincos"],
    "model.num_classes": ["model.family=dit", "model.num_classes=5", "model.crossattn_emb_size=2"],
    "validation.sampling.second_prompt": SECOND,
    "validation.sampling.second_guidance": SECOND,
    "model.compat": ["model.family=moviegen", "model.hidden_size=256"],
}
"""What has to be set first."""
OF_BUNDLES = ("autoguidance", "cache_budget", "adapter_interval", "image_guidance", "low_guidance")
REFUSED = [
    *(f"validation.sampling.{name}" for name in OF_BUNDLES),
    *("model.image_size", "model.image_positions"),
]
"""Said of a bundle alone; a run refuses them by name (test_rules.py)."""
SETTINGS = [key for key in config_keys() if key not in ("recipe", *REFUSED)]  # the recipe is chosen by --recipe


def hint_of(key: str):
    hint = RunConfig
    for name in key.split("."):
        section = next((part for part in (hint, *get_args(hint)) if is_dataclass(part)), hint)
        hint = get_type_hints(section)[name]
    return hint


def another(value, hint):
    """Another value of the annotated type."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != value)
    if get_origin(hint) is tuple:
        inner = [inner for inner in get_args(hint) if inner is not Ellipsis]
        return [another(item, inner[0]) for item in value or [None] * len(inner)]
    return {
        bool: lambda: not value,
        int: lambda: 2 * (value or 1),
        float: lambda: value / 2 if value else 0.5,
        str: lambda: "elsewhere",
    }[hint]()


@cache
def digits(*overrides: str) -> RunConfig:
    return resolve_config("digits", overrides=list(overrides))


def test_every_key_can_be_set():
    for key in SETTINGS:
        needs = NEEDS.get(key, [])
        run = digits(*needs)
        changed = digits(*needs, f"{key}={json.dumps(new_value(run, key))}")
        assert [name for name in config_keys() if read_key(changed, name) != read_key(run, name)] == [key]


def new_value(run: RunConfig, key: str):
    return SPECIAL[key] if key in SPECIAL else another(read_key(run, key), hint_of(key))


def read_key(run: RunConfig, key: str):
    value = run
    for name in key.split("."):
        value = getattr(value, name, None)  # of a section that is left out
    return value


# ------------------------------------------------------------------------------------------------ names of others

OF_SECTION = {ours: [key for key in SETTINGS if key.startswith(f"{ours}.")] for ours in SECTIONS.values()}
OF_SECTIONS = {
    f"{theirs}.{key.removeprefix(f'{ours}.')}": key
    for theirs, ours in SECTIONS.items()
    for key in (OF_SECTION[ours][0], OF_SECTION[ours][-1])
}
OTHER_NAMES = OF_SECTIONS | KEYS
OTHER_VALUES = {
    "model.val_generation_guidance": lambda ours: ours - 1,
    "optimizer.use_distributed_optimizer": lambda ours: ours == "distributed_optimizer",
    "optim.config.use_distributed_optimizer": lambda ours: ours == "distributed_optimizer",
    "flow_matching.flow_shift": math.exp,
    "scheduler.warm_up_steps": lambda ours: [ours],
    "scheduler.cycle_lengths": lambda ours: [ours],
    "model.ema.rate": lambda ours: ours[0],
}
"""How a value of ours is written under these names."""


def test_every_other_name_means_one_of_ours():
    for theirs, ours in OTHER_NAMES.items():
        needs = NEEDS.get(ours, [])
        run = digits(*needs)
        value = new_value(run, ours)
        others = [need for need in needs if not need.startswith(f"{ours}=")]
        expected = digits(*others, f"{ours}={json.dumps(value)}")
        written = OTHER_VALUES.get(theirs, lambda ours: ours)(value)
        assert digits(*others, f"{theirs}={json.dumps(written)}") == expected != run, theirs


def test_what_is_always_so_is_taken_at_that_value_and_refused_at_any_other():
    taken = [f"{theirs}={json.dumps(only)}" for theirs, (only, _) in FIXED.items()]
    assert resolve_config("digits", overrides=taken) == load_recipe("digits")
    for theirs, (only, reason) in FIXED.items():
        with pytest.raises(UserError, match=re.escape(f"{theirs}=other does not exist here, only {only}: {reason}")):
            resolve_config("digits", overrides=[f"{theirs}=other"])


@pytest.mark.parametrize(
    "section", ["model", "model.config", "trainer.strategy", "train", "dataset", "data.task_encoder"]
)
def test_what_is_not_needed_is_said_in_every_section_but_where_it_is_a_key(section):
    for name, reason in NOT_NEEDED.items():
        if name == "max_frames" and section.startswith("data"):
            continue  # which crops clips
        with pytest.raises(UserError, match=re.escape(f"{section}.{name} does not exist here: {reason}; leave it out")):
            resolve_config("digits", overrides=[f"{section}.{name}=2"])
    assert resolve_config("digits", overrides=["data.max_frames=2"]).data.max_frames == 2


def test_the_number_of_ranks_is_no_setting():
    for theirs in STARTED_BY_TORCHRUN:
        with pytest.raises(UserError, match=f"{theirs} is set where the ranks are started"):
            resolve_config("digits", overrides=[f"{theirs}=2"])


def test_a_run_is_not_renamed():
    with pytest.raises(UserError, match="choose one with --recipe NAME"):
        resolve_config("digits", overrides=["recipe=pretrain_xl"])


def test_a_network_takes_over_what_its_data_set_decides(tiny_dataset, tmp_path):
    """Unless it is told otherwise; of a data set that is not there, nothing."""
    from megadit.train.dataset.dataset_info import DatasetInfo

    info, recipe = DatasetInfo.read(tiny_dataset), load_recipe("digits")
    of_data = (info.latent_channels, info.text_width, info.sigma_data)
    of_recipe = (recipe.model.in_channels, recipe.model.crossattn_emb_size, recipe.model.sigma_data)
    assert not set(of_data) & set(of_recipe)

    def shared(*overrides, **more):
        model = resolve_config("digits", overrides=[*overrides], **more).model
        return model.in_channels, model.crossattn_emb_size, model.sigma_data

    here = f"data.path={tiny_dataset}"
    assert shared(here) == of_data
    assert shared(here, "model.in_channels=5") == (5, *of_data[1:])
    file = write(tmp_path / "run.yaml", f"data: {{path: {tiny_dataset}}}\nmodel: {{sigma_data: 0.25}}")
    assert shared(config_file=file) == (*of_data[:2], 0.25)
    assert shared(here, "data.mock=true") == shared("data.path=/nowhere") == shared() == of_recipe


@pytest.mark.parametrize("value", ["${oc.env:HOME}", "a-${oc.env:X,b}", "${a.${oc.env:X}}", "${oc.decode:x}"])
def test_a_file_has_nothing_looked_up_outside_of_it(tmp_path, value):
    """It may be the config.yaml of somebody else's run; keys of its own it may refer to."""
    path = tmp_path / "config.yaml"
    path.write_text(f"recipe: digits\ntrain:\n  output_dir: {json.dumps(value)}\n")
    with pytest.raises(UserError, match=r"train.output_dir=.* something outside the file"):
        resolve_config(config_file=path)
    path.write_text("recipe: digits\ntrain:\n  output_dir: run-${train.seed}\n  seed: 7\n")
    assert resolve_config(config_file=path).train.output_dir == "run-7"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("train: " + "[" * 3000 + "]" * 3000, "more than 100 lists and objects within one another"),
        (
            "train:\n" + "".join(f"  a{n}: " + f"${{train.a{n + 1}}}" * 10 + "\n" for n in range(9)),
            "grow without end",
        ),
        (
            "a: &a [x, x, x, x, x, x]\n" + "".join(f"{y}: &{y} [{f'*{x}, ' * 9}]\n" for x, y in pairwise("abcdefg")),
            "is not valid YAML",
        ),
        (None, "is longer than"),
    ],
    ids=["deep", "references", "aliases", "holes"],
)
def test_a_small_file_does_not_grow(tmp_path, text, reason):
    path = tmp_path / "config.yaml"
    path.write_text(text or "")
    if text is None:
        os.truncate(path, 1 << 42)
    for read in (lambda path: resolve_config(config_file=path), load_config, _read_run_config, describe_blend):
        with pytest.raises(UserError) as raised:
            read(path)
        assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match=reason):
        resolve_config(config_file=path)


@pytest.mark.parametrize(
    ("key", "meant"),
    [("optimizer.learning_rate", "optimizer.lr"), ("train.max_steps", "train.train_iters")]
    + [("data.batch_size", "data.global_batch_size"), ("sampling.num_steps", "validation.sampling.num_steps")],
)
def test_other_words_for_a_key_lead_to_it(key, meant):
    with pytest.raises(UserError, match=rf"unknown key {key}; did you mean {meant}\?"):
        resolve_config("digits_tiny", config_file=None, overrides=[f"{key}=1"])


def test_the_network_of_an_adapter_is_that_of_its_base(tmp_path):
    """The recipe's own shape is the demo's; what is said of the network on the command line still counts."""
    base = write_tiny_bundle(tmp_path / "base")
    asked = ["data.mock=true", f"checkpoint.init_from={base.path}"]
    assert resolve_config("digits_dreambooth", overrides=asked).model == base.config
    changed = resolve_config("digits_dreambooth", overrides=[*asked, "model.num_layers=3"]).model
    assert (changed.num_layers, changed.hidden_size) == (3, base.config.hidden_size)
    plain = resolve_config("digits", overrides=asked).model
    assert plain == resolve_config("digits").model, "whole networks have the recipe's shape"
    assert resolve_config("digits", overrides=[*asked, "train.adapter.rank=2"]).model == base.config


def test_numbers_of_yaml_are_those_of_everybody():
    """YAML 1.1 has octal numbers and those of base 60, 4:00:00 for one; each is told before it is misread."""
    read, texts = 0, ["".join(parts) for length in range(1, 5) for parts in product("017:_.", repeat=length)]
    for text in texts:
        with suppress(yaml.YAMLError, ValueError):
            if isinstance(number := yaml.load(text, Loader=yaml.CSafeLoader), int | float):
                assert OLD_NUMBERS.fullmatch(text) or float(text.replace("_", "")) == number, text
                read += 1
    assert read > 300


@pytest.mark.parametrize("text", ["4:00:00", "010", "-1:30", "1:30.5", "[1, 4:00:00]"])
def test_a_number_that_yaml_misreads_is_told_in_a_file_and_text_on_the_command_line(text, tmp_path):
    path = write(tmp_path / "chain.yaml", f"stages:\n  train:\n    command: echo\n    time: {text}\n")
    with pytest.raises(UserError, match=r"chain.yaml, line 4: \S+ is \S+ to YAML; write it in quotes"):
        change(ChainConfig(), config_file=path)
    if "[" not in text:
        asked = [f"stages.train.time={text}", "stages.train.command=echo"]
        assert change(ChainConfig(), overrides=asked).stages["train"].time == text


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("run.yaml", "train:\n  - seed: 1\n", "train holds several keys and cannot be set to"),
        ("run.yaml", "validation: {sampling: [1]}\n", "one of them, as validation.sampling.key="),
        ("run.yaml", "validation: {prompts: {a: b}}\n", "validation.prompts is a list; write"),
        ("run.yaml", "train: {on: 1}\n", "the key train.True is bool to YAML; write it in quotes"),
        ("run.toml", "[[train]]\nseed = 1\n", "train holds several keys and cannot be set to"),
    ],
)
def test_a_value_of_another_shape_is_told(name, text, reason, tmp_path):
    with pytest.raises(UserError, match=reason):
        resolve_config("digits_tiny", config_file=write(tmp_path / name, text))


def test_toml_of_windows_is_read(tmp_path):
    path = tmp_path / "RUN.TOML"
    path.write_bytes(b"\xef\xbb\xbf[train]\r\nseed = 7\r\n")
    assert resolve_config("digits_tiny", config_file=path).train.seed == 7


@pytest.mark.parametrize(
    "wrong", ["train..seed=1", "train.seed.=1", "validation.prompts=[a", "logger.wandb_exp_name=*x"]
)
def test_of_several_overrides_the_wrong_one_is_told(wrong):
    with pytest.raises(UserError, match=re.escape(f"cannot read {wrong!r}: ")):
        resolve_config("digits_tiny", overrides=["train.train_iters=3", wrong])
