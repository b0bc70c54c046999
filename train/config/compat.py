"""Translation of the configuration keys of NeMo, DFM, Megatron-Bridge, AutoModel and cosmos-framework, in files and
overrides.

A key of megadit always means itself. Any other key is looked up here, whole or by its section. A key without a
counterpart is left unchanged, and later refused by name. Settings that have only one possible value here
(`model.qkv_format=thd`) are accepted with that value and refused with any other.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from megadit.models.shared.errors import UserError

SECTIONS = {
    "model.config": "model",
    "trainer.strategy": "parallel",
    "trainer.strategy.ddp": "parallel",
    "data.task_encoder": "data",
    "dataset": "data",
    "optim.config": "optimizer",
    "scheduler": "optimizer",
    "ddp": "parallel",
    "lr_scheduler": "optimizer",
    "data.dataloader": "data",
}
"""Their section -> megadit's, for keys with the same name in both."""

_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
)
_RECOMPUTE = ("recompute_granularity", "recompute_num_layers")

_EXPERTS = {
    "num_moe_experts": "num_experts",
    "moe_router_topk": "top_k",
    "moe_ffn_hidden_size": "ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "shared_ffn_hidden_size",
    "moe_aux_loss_coeff": "balance_coefficient",
    "moe_expert_capacity_factor": "capacity_factor",
}

KEYS = {
    **{f"model.{theirs}": f"model.experts.{ours}" for theirs, ours in _EXPERTS.items()},
    **{f"model.config.{theirs}": f"model.experts.{ours}" for theirs, ours in _EXPERTS.items()},
    **{f"model.{name}": f"parallel.{name}" for name in (*_LAYOUT, *_RECOMPUTE)},
    **{f"model.config.{name}": f"parallel.{name}" for name in _RECOMPUTE},
    "diffusion.objective": "model.parameterization",
    "model.seq_length": "data.seq_length",
    "model.config.seq_length": "data.seq_length",
    "model.vae_cache_folder": "validation.tokenizer_folder",
    "model.val_generation_guidance": "validation.sampling.guidance",
    "model.val_generation_num_steps": "validation.sampling.num_steps",
    "dataset.task_encoder_seq_length": "data.seq_length",
    "train.global_batch_size": "data.global_batch_size",
    "train.micro_batch_size": "data.micro_batch_size",
    "train.eval_interval": "validation.interval",
    "train.eval_iters": "validation.num_batches",
    "trainer.max_steps": "train.train_iters",
    "trainer.max_epochs": "train.max_epochs",
    "trainer.val_check_interval": "validation.interval",
    "trainer.limit_val_batches": "validation.num_batches",
    "trainer.log_every_n_steps": "train.log_interval",
    "trainer.strategy.fsdp": "parallel.data_parallel",
    "data.task_encoder.aesthetic_score": "data.min_aesthetic_score",
    "optim.lr_scheduler.warmup_steps": "optimizer.lr_warmup_iters",
    "optim.lr_scheduler.min_lr": "optimizer.min_lr",
    "resume.restore_config.path": "checkpoint.init_from",
    "log.wandb.project": "logger.wandb_project",
    "optimizer.use_distributed_optimizer": "parallel.data_parallel",
    "optim.config.use_distributed_optimizer": "parallel.data_parallel",
    "rng.seed": "train.seed",
    "log.log_dir": "train.output_dir",
    "checkpoint.save": "train.output_dir",
    "logger.log_interval": "train.log_interval",
    "ddp.use_distributed_optimizer": "parallel.data_parallel",
    "ddp.use_megatron_fsdp": "parallel.data_parallel",
    "checkpoint.pretrained_checkpoint": "checkpoint.init_from",
    "mixed_precision": "train.precision",
    "seed": "train.seed",
    "model.pretrained_model_name_or_path": "checkpoint.init_from",
    "data.dataloader.cache_dir": "data.path",
    "step_scheduler.global_batch_size": "data.global_batch_size",
    "step_scheduler.local_batch_size": "data.micro_batch_size",
    "step_scheduler.ckpt_every_steps": "checkpoint.save_interval",
    "step_scheduler.num_epochs": "train.max_epochs",
    "step_scheduler.max_steps": "train.train_iters",
    "step_scheduler.log_remote_every_steps": "train.log_interval",
    "lr_scheduler.lr_warmup_steps": "optimizer.lr_warmup_iters",
    "flow_matching.timestep_sampling": "diffusion.noise_levels",
    "flow_matching.flow_shift": "diffusion.p_mean",
    "flow_matching.logit_std": "diffusion.p_std",
    "fsdp.tp_size": "parallel.tensor_model_parallel_size",
    "fsdp.cp_size": "parallel.context_parallel_size",
    "fsdp.pp_size": "parallel.pipeline_model_parallel_size",
    "fsdp.activation_checkpointing": "parallel.recompute_granularity",
    "peft.dim": "train.adapter.rank",
    "peft.alpha": "train.adapter.alpha",
    "peft.dropout": "train.adapter.dropout",
    "checkpoint.checkpoint_dir": "train.output_dir",
    "trainer.max_iter": "train.train_iters",
    "trainer.logging_iter": "train.log_interval",
    "trainer.distributed_parallelism": "parallel.data_parallel",
    "trainer.callbacks.grad_clip.clip_norm": "optimizer.clip_grad",
    "checkpoint.save_iter": "checkpoint.save_interval",
    "checkpoint.load_path": "checkpoint.init_from",
    "dataloader_train.max_sequence_length": "data.seq_length",
    "scheduler.warm_up_steps": "optimizer.lr_warmup_iters",
    "scheduler.cycle_lengths": "optimizer.lr_decay_iters",
    "optimizer.eps": "optimizer.adam_eps",
    "model.max_num_tokens_after_packing": "data.seq_length",
    "model.precision": "train.precision",
    "model.ema.rate": "ema.sigma_rels",
    "model.lora_rank": "train.adapter.rank",
    "model.lora_alpha": "train.adapter.alpha",
    "model.activation_checkpointing.mode": "parallel.recompute_granularity",
    "model.parallelism.context_parallel_shard_degree": "parallel.context_parallel_size",
}
"""Their key -> megadit's, where the names differ; from `seed` on AutoModel's, from `trainer.max_iter` on
cosmos-framework's."""

PAIRS = {"optimizer.betas": ("optimizer.adam_beta1", "optimizer.adam_beta2")}
"""Their key of two numbers -> megadit's of each."""


def _only(numbers: Any) -> Any:
    """The number of a list of one."""
    return numbers[0] if isinstance(numbers, list) and len(numbers) == 1 else numbers


def _data_parallel(is_distributed: Any) -> str:
    return "distributed_optimizer" if is_distributed else "ddp"


_VALUES: dict[str, Callable[[Any], Any]] = {
    # NeMo's guidance is cond + g (cond - uncond), megadit's uncond + g (cond - uncond)
    "model.val_generation_guidance": lambda guidance: guidance + 1 if isinstance(guidance, int | float) else guidance,
    **{f"{section}.use_distributed_optimizer": _data_parallel for section in ("optimizer", "optim.config", "ddp")},
    "trainer.strategy.fsdp": lambda name: "fsdp" if name in ("megatron", "pytorch") else name,
    "ddp.use_megatron_fsdp": lambda is_on: {True: "fsdp", False: "ddp"}.get(is_on, is_on),
    "mixed_precision": lambda name: {"bf16_mixed": "bf16", "16_mixed": "fp16", "fp16_mixed": "fp16"}.get(name, name),
    "flow_matching.timestep_sampling": lambda name: "log_normal" if name == "logit_normal" else name,
    "flow_matching.flow_shift": lambda shift: (
        math.log(shift) if isinstance(shift, int | float) and shift > 0 else shift
    ),
    "fsdp.activation_checkpointing": lambda is_on: {True: "full", False: "none"}.get(is_on, is_on),
    "scheduler.warm_up_steps": _only,
    "scheduler.cycle_lengths": _only,
    "model.precision": lambda name: {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(name, name),
    "model.ema.rate": lambda width: [width],
}

_NO_MASK = ("no_mask", "no sample attends to another or to padding, and nothing else is masked")
FIXED: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("model.qkv_format", "model.config.qkv_format"), ("thd", "samples are always packed")),
    **dict.fromkeys(("model.attn_mask_type", "model.config.attn_mask_type"), _NO_MASK),
    **{
        f"{section}.check_for_nan_in_grad": (True, "health.on_not_finite says what follows")
        for section in ("ddp", "trainer.strategy.ddp")
    },
    "checkpoint.ckpt_format": ("torch_dist", "that is what is written"),
    "checkpoint.load_optim": (True, "to start from weights alone, give checkpoint.init_from"),
    "checkpoint.fully_parallel_save": (True, "all data-parallel ranks write"),
    "resume.resume_if_exists": (True, "a run resumes from its folder: for a new one, give another train.output_dir"),
    "comm_overlap": (None, "set parallel.overlap_grad_reduce and parallel.overlap_param_gather"),
    "flow_matching.logit_mean": (0.0, "the mean of ln sigma is the logarithm of flow_shift: set diffusion.p_mean"),
    "flow_matching.sigma_min": (0.0, "all of t is trained"),
    "flow_matching.sigma_max": (1.0, "all of t is trained"),
    "scheduler.f_max": ([1.0], "optimizer.lr is the largest rate"),
    "scheduler.f_min": ([0.0], "set optimizer.min_lr"),
    "scheduler.f_start": ([0.0], "the warm-up begins at 0"),
    "model.ema.enabled": (True, "for none, set ema.sigma_rels=[]"),
    "model.lora_enabled": (True, "for none, leave train.adapter out"),
    "model.compile.enabled": (False, "training is not compiled"),
    "model.parallelism.data_parallel_shard_degree": (-1, "all data-parallel ranks share the weights"),
}
"""Their key -> its only supported value, and the reason."""

_ANY_SIZE = "positions are computed for clips of any size"
_COLLECTED = "each rank collects its garbage as Python does"
NOT_NEEDED = {
    **dict.fromkeys(("max_frames", "max_img_h", "max_img_w"), _ANY_SIZE),
    **dict.fromkeys(("manual_gc", "manual_gc_interval", "manual_gc_eval"), _COLLECTED),
    "pipeline_dtype": "pipeline stages exchange what they compute, in train.precision",
    "text_embedding_padding_size": "texts are packed with the tokens that they have",
}
"""Last name of their key in any section -> the reason why there is no such setting."""
STARTED_BY_TORCHRUN = ("trainer.devices", "trainer.num_nodes")


def translate(values: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """The same values under megadit's dotted keys; `known` are all of them. Raises UserError for a value that has no
    counterpart here, or two names of one key with different values."""
    translated: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for theirs, key, value in _one_by_one(_without_recompute_method(values)):
        ours = _our_key(key, known)
        if ours is None or (ours != key and value is None):
            if value is not None and value != FIXED[key][0]:
                raise UserError(f"{key}={value} does not exist here, only {FIXED[key][0]}: {FIXED[key][1]}")
            continue
        value = _VALUES[key](value) if key in _VALUES and ours != key else value
        if translated.get(ours, value) != value:
            raise UserError(f"{sources[ours]} and {theirs} both mean {ours}, and differ; keep one of them")
        translated[ours], sources[ours] = value, theirs
    return translated


def _without_recompute_method(values: dict[str, Any]) -> dict[str, Any]:
    """Megatron's `block` recomputes the first `recompute_num_layers` blocks of a stage, as that key does here; its
    `uniform` recomputes all of them, `recompute_num_layers` at a time."""
    left = dict(values)
    for key in [key for key in values if key.endswith(".recompute_method")]:
        method = left.pop(key)
        if method == "uniform":
            left.pop(key.replace("recompute_method", "recompute_num_layers"), None)
        elif method not in ("block", None):
            raise UserError(f"{key}={method} does not exist here, only block and uniform")
    return left


def _one_by_one(values: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(their key, the key of one value, the value), of which `PAIRS` have two."""
    for theirs, value in values.items():
        keys = PAIRS.get(theirs, (theirs,))
        if theirs in PAIRS and not (isinstance(value, list) and len(value) == len(keys)):
            raise UserError(f"{theirs}={value} must be two numbers, such as [0.9,0.95]")
        yield from ((theirs, *each) for each in zip(keys, value if theirs in PAIRS else [value], strict=True))


def _our_key(key: str, known: set[str]) -> str | None:
    """Megadit's key that `key` means; `key` itself if there is none; None for keys with a fixed value."""
    if key in known:
        return key
    if key in FIXED:
        return None
    if key in STARTED_BY_TORCHRUN:
        raise UserError(f"{key} is set where the ranks are started: --nproc N, or torchrun --nnodes/--nproc-per-node")
    if KEYS.get(key) in known:
        return KEYS[key]
    for theirs, ours in SECTIONS.items():
        candidate = f"{ours}.{key.removeprefix(theirs + '.')}"
        if key.startswith(f"{theirs}.") and candidate in known:
            return candidate
    name = key.rpartition(".")[2]
    if name in NOT_NEEDED and name != key:
        raise UserError(f"{key} does not exist here: {NOT_NEEDED[name]}; leave it out")
    return key


def expand_braces(override: str) -> list[str]:
    """`parallel.{tensor_model,context}_parallel_size=2` as two overrides, as a shell writes them where it can."""
    key, equals, value = override.partition("=")
    found = re.search(r"\{([^{}]*,[^{}]*)\}", key)
    if found is None:
        return [override]
    names = [key[: found.start()] + name.strip() + key[found.end() :] for name in found[1].split(",")]
    return [part for name in names for part in expand_braces(name + equals + value)]
