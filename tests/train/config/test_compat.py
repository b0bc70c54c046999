"""Names of NeMo and DFM reach the same fields as ours, or are refused by name."""

import re

import pytest

from megadit.models.shared.errors import UserError
from megadit.train.__main__ import main
from megadit.train.config.compat import KEYS, SECTIONS, expand_braces
from megadit.train.config.load import config_keys, resolve_config
from megadit.train.recipes import load_recipe

SAME = {
    "trainer.strategy.tensor_model_parallel_size=2": "parallel.tensor_model_parallel_size=2",
    "model.tensor_model_parallel_size=2": "parallel.tensor_model_parallel_size=2",
    "model.config.hidden_size=1024": "model.hidden_size=1024",
    "data.task_encoder.seq_length=1024": "data.seq_length=1024",
    "dataset.task_encoder_seq_length=1024": "data.seq_length=1024",
    "dataset.path=elsewhere": "data.path=elsewhere",
    "dataset.use_train_split_for_val=true": "data.use_train_split_for_val=true",
    "checkpoint.save=elsewhere": "train.output_dir=elsewhere",
    "model.vae_cache_folder=elsewhere": "validation.tokenizer_folder=elsewhere",
    "model.val_generation_guidance=5.0": "validation.sampling.guidance=6.0",
    "train.global_batch_size=16": "data.global_batch_size=16",
    "optim.config.lr=0.1": "optimizer.lr=0.1",
    "scheduler.lr_warmup_iters=7": "optimizer.lr_warmup_iters=7",
    "optimizer.use_distributed_optimizer=true": "parallel.data_parallel=distributed_optimizer",
    "rng.seed=9": "train.seed=9",
    "ddp.use_distributed_optimizer=true": "parallel.data_parallel=distributed_optimizer",
    "ddp.overlap_grad_reduce=false": "parallel.overlap_grad_reduce=false",
    "checkpoint.pretrained_checkpoint=elsewhere": "checkpoint.init_from=elsewhere",
    "mixed_precision=16_mixed": "train.precision=fp16",
    "trainer.strategy.fsdp=megatron": "parallel.data_parallel=fsdp",
    "trainer.strategy.ddp.overlap_grad_reduce=false": "parallel.overlap_grad_reduce=false",
    "ddp.use_megatron_fsdp=true": "parallel.data_parallel=fsdp",
    "data.task_encoder.aesthetic_score=5.0": "data.min_aesthetic_score=5.0",
    "optim.lr_scheduler.warmup_steps=7": "optimizer.lr_warmup_iters=7",
    "optim.lr_scheduler.min_lr=1e-6": "optimizer.min_lr=1e-6",
    "resume.restore_config.path=elsewhere": "checkpoint.init_from=elsewhere",
    "log.wandb.project=videos": "logger.wandb_project=videos",
    "seed=9": "train.seed=9",
    "data.dataloader.cache_dir=elsewhere": "data.path=elsewhere",
    "data.dataloader.num_workers=3": "data.num_workers=3",
    "step_scheduler.global_batch_size=16": "data.global_batch_size=16",
    "lr_scheduler.lr_warmup_steps=7": "optimizer.lr_warmup_iters=7",
    "lr_scheduler.min_lr=1e-6": "optimizer.min_lr=1e-6",
    "flow_matching.timestep_sampling=uniform": "diffusion.noise_levels=uniform",
    "flow_matching.flow_shift=2.0": "diffusion.p_mean=0.6931471805599453",
    "fsdp.cp_size=2": "parallel.context_parallel_size=2",
    "fsdp.activation_checkpointing=true": "parallel.recompute_granularity=full",
    "peft.dim=8": "train.adapter.rank=8",
    "trainer.max_iter=500": "train.train_iters=500",
    "trainer.distributed_parallelism=fsdp": "parallel.data_parallel=fsdp",
    "trainer.callbacks.grad_clip.clip_norm=0.1": "optimizer.clip_grad=0.1",
    "dataloader_train.max_sequence_length=45056": "data.seq_length=45056",
    "scheduler.warm_up_steps=[50]": "optimizer.lr_warmup_iters=50",
    "model.ema.rate=0.2": "ema.sigma_rels=[0.2]",
    "model.lora_rank=16": "train.adapter.rank=16",
    "model.precision=float16": "train.precision=fp16",
}


def test_their_names_set_our_values(tmp_path):
    file = tmp_path / "theirs.yaml"
    for theirs, ours in SAME.items():
        expected = resolve_config("pretrain_xl", overrides=[ours])
        assert expected != load_recipe("pretrain_xl"), ours
        assert resolve_config("pretrain_xl", overrides=[theirs]) == expected, theirs
        key, _, value = theirs.partition("=")
        *sections, name = key.split(".")
        yaml = "".join(f"{'  ' * depth}{section}:\n" for depth, section in enumerate(sections))
        file.write_text(f"{yaml}{'  ' * len(sections)}{name}: {value}\n")
        assert resolve_config("pretrain_xl", config_file=file) == expected, theirs


def test_every_alias_leads_to_a_key_of_ours():
    known, sections = set(config_keys()), {key.partition(".")[0] for key in config_keys()}
    later = {"parallel.virtual_pipeline_model_parallel_size"} | {key for key in KEYS.values() if ".recompute" in key}
    assert set(KEYS.values()) - known <= later
    assert set(SECTIONS.values()) <= sections and not known & set(KEYS)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.config.num_layer=3"], "unknown key model.config.num_layer; did you mean model.num_layers?"),
        (["data.seq_length=8", "data.task_encoder.seq_length=9"], "both mean data.seq_length, and differ"),
        (["model.qkv_format=sbhd"], "model.qkv_format=sbhd does not exist here, only thd: samples are always packed"),
        (["ddp.check_for_nan_in_grad=false"], "only True: health.on_not_finite says what follows"),
        (["checkpoint.load_optim=false"], "give checkpoint.init_from"),
        (["model.val_generation_guidance=much"], "validation.sampling.guidance='much' is str, expected float"),
        (["flow_matching.logit_mean=0.5"], "only 0.0: the mean of ln sigma is the logarithm of flow_shift"),
        (["trainer.devices=8"], "set where the ranks are started"),
        (["scheduler.cycle_lengths=[1000,2000]"], "optimizer.lr_decay_iters=[1000, 2000] is list, expected int"),
        (["optimizer.betas=0.9"], "optimizer.betas=0.9 must be two numbers"),
        (["optimizer.adam_beta1=0.8", "optimizer.betas=[0.9,0.95]"], "both mean optimizer.adam_beta1, and differ"),
    ],
)
def test_what_has_no_counterpart_is_refused(overrides, message):
    with pytest.raises(UserError, match=re.escape(message)):
        resolve_config("digits", overrides=overrides)


SFT = """
[model]
max_num_tokens_after_packing = 45056
precision = "bfloat16"
[model.activation_checkpointing]
mode = "full"
[optimizer]
betas = [0.8, 0.9]
eps = 1.0e-6
[scheduler]
cycle_lengths = [1000]
f_min = [0.0]
warm_up_steps = [50]
[trainer]
max_iter = 500
[checkpoint]
save_iter = 100
load_path = "LOAD"
[dataloader_train]
max_sequence_length = 45056
"""


def test_a_toml_of_cosmos_framework(tmp_path):
    (tmp_path / "sft.toml").write_text(SFT.replace("LOAD", "elsewhere"))
    ours = ["data.seq_length=45056", "train.precision=bf16", "parallel.recompute_granularity=full"]
    ours += ["optimizer.adam_beta1=0.8", "optimizer.adam_beta2=0.9", "optimizer.adam_eps=1e-6"]
    ours += ["optimizer.lr_decay_iters=1000", "optimizer.lr_warmup_iters=50", "train.train_iters=500"]
    ours += ["checkpoint.save_interval=100", "checkpoint.init_from=elsewhere"]
    assert resolve_config("digits", config_file=tmp_path / "sft.toml") == resolve_config("digits", overrides=ours)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (SFT.replace("LOAD", "${oc.env:HOME}"), "give checkpoint.load_path=VALUE on the command line"),
        ("[train\n", "is not valid TOML: Expected ']'"),
        ("a = " + "[" * 5000, "is nested too deeply"),
        ("a = 1979-05-27", "is not valid TOML"),
    ],
)
def test_a_toml_that_is_refused(tmp_path, content, message):
    (tmp_path / "sft.toml").write_text(content)
    with pytest.raises(UserError, match=re.escape(message)):
        resolve_config("digits", config_file=tmp_path / "sft.toml")


def test_what_is_always_so_may_be_said():
    assert resolve_config("digits", overrides=["model.qkv_format=thd", "checkpoint.save=null"]) == load_recipe("digits")


def test_braces_stand_for_several_names():
    names = "parallel.{tensor_model,pipeline_model,context}_parallel_size=1"
    assert expand_braces(names) == [
        f"parallel.{name}_parallel_size=1" for name in ("tensor_model", "pipeline_model", "context")
    ]
    mapping = "parallel={tensor_model_parallel_size: 2, sequence_parallel: true}"
    expected = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
    assert resolve_config("pretrain_xl", overrides=[mapping]) == resolve_config("pretrain_xl", overrides=expected)
    assert expand_braces("validation.prompts=[a,{b,c}]") == ["validation.prompts=[a,{b,c}]"]


def test_factory_is_recipe_and_yes_is_taken(capsys):
    assert main(["--yes", "--factory", "pretrain_l", "--print-config"]) == 0
    assert "recipe: pretrain_l" in capsys.readouterr().out


def test_ways_of_recomputing():
    full = ["model.config.recompute_granularity=full", "model.config.recompute_num_layers=1"]
    uniform = resolve_config("digits", overrides=[*full, "model.config.recompute_method=uniform"])
    block = resolve_config("digits", overrides=[*full, "model.config.recompute_method=block"])
    assert uniform.parallel.recompute_num_layers is None
    assert block.parallel.recompute_num_layers == 1
    with pytest.raises(UserError, match="only block and uniform"):
        resolve_config("digits", overrides=[*full, "model.config.recompute_method=some"])


def test_two_names_of_one_setting_must_agree():
    with pytest.raises(UserError, match=r"both mean validation\.sampling\.guidance, and differ"):
        resolve_config("digits", overrides=["model.val_generation_guidance=2", "validation.sampling.guidance=4"])
