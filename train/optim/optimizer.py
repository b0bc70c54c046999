"""Megatron's optimizers around AdamW or Muon, and its learning-rate schedules."""

from collections.abc import Sequence

import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megadit.train.config.schema import OptimizerConfig, Precision, RunConfig
from megadit.train.optim.adamw import HalfMomentAdamW
from megadit.train.optim.muon import Muon
from megadit.train.optim.state import DataParallel, named_parameters

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEAST_LOSS_SCALE = 1.0


def precision(config: RunConfig) -> torch.dtype:
    """Data type in which the network computes."""
    return DTYPES[config.train.precision]


def build_optimizer(config: RunConfig, parts: Sequence[DataParallel]) -> MegatronOptimizer:
    """Build the optimizer of a run.

    AdamW updates everything on every data-parallel rank, or one shard on each with Megatron's distributed optimizer.
    Muon needs whole matrices: data-parallel ranks divide them among themselves, with `ddp` and `distributed_optimizer`.
    """
    if config.optimizer.optimizer == "muon":
        return _muon(config, parts)
    optimizer = get_megatron_optimizer(_megatron_config(config), list(parts), use_gloo_process_groups=False)
    for part in optimizer.chained_optimizers:
        if config.optimizer.moments == "bf16":
            _halve_moments(part, config.optimizer)
        else:
            fuse_updates(part.optimizer)
    return optimizer


def fuse_updates(optimizer: torch.optim.Optimizer) -> None:
    """Use the fused kernel of torch's AdamW on GPUs, whose default takes as much extra memory as all gradients.
    Megatron uses torch's AdamW if TransformerEngine and apex are missing."""
    if isinstance(optimizer, torch.optim.AdamW) and all(p.is_cuda for g in optimizer.param_groups for p in g["params"]):
        for group in optimizer.param_groups:
            group.update(fused=True, foreach=False)


def _halve_moments(part: MegatronOptimizer, settings: OptimizerConfig) -> None:
    """Replace Megatron's AdamW by `HalfMomentAdamW` with the same groups, before it has state."""
    part.optimizer = HalfMomentAdamW(
        part.optimizer.param_groups,
        lr=settings.lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
    )


def uses_distributed_optimizer(config: RunConfig) -> bool:
    """Whether gradients are reduce-scattered to the ranks that own them, which DDP must know."""
    return config.parallel.data_parallel == "distributed_optimizer" and config.optimizer.optimizer != "muon"


def build_scheduler(config: RunConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Linear warm-up from 0, then cosine, linear or no decay to `min_lr`.

    Call `step(1)` after each update, as Megatron's training loop does: with a warm-up the first update has a rate of 0,
    as in EDM's.
    """
    settings = config.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=config.lr_decay_iters,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def loss_scaler(optimizer: MegatronOptimizer) -> DynamicGradScaler | None:
    """Loss scaler of an fp16 run, which multiplies the loss and divides the gradients before an update; else None."""
    return getattr(optimizer.chained_optimizers[0], "grad_scaler", None)


def scaler_state(optimizer: MegatronOptimizer) -> dict[str, float] | None:
    """State of the loss scaler as plain numbers, for a checkpoint."""
    scaler = loss_scaler(optimizer)
    return None if scaler is None else {name: float(value) for name, value in scaler.state_dict().items()}


def restore_scaler(optimizer: MegatronOptimizer, state: dict[str, float] | None) -> None:
    """Restore the result of `scaler_state`; without one (the run had another precision) the scaler starts anew."""
    scaler = loss_scaler(optimizer)
    if scaler is not None and state is not None:
        counts = {name: int(value) for name, value in state.items()}
        # Megatron tests whether the count equals the window, so a count beyond a shortened window would never match
        counts["growth_tracker"] = min(counts["growth_tracker"], scaler.growth_interval - 1)
        scaler.load_state_dict({**counts, "scale": torch.tensor([state["scale"]])})


def uses_muon(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon updates a parameter: matrices of the blocks (a fused qkv is one matrix)."""
    return ".blocks." in name and parameter.ndim == 2


def _megatron_config(config: RunConfig) -> MegatronOptimizerConfig:
    settings = config.optimizer
    is_distributed = uses_distributed_optimizer(config)
    # the parameters that FSDP shards are float32
    precision = "fp32" if config.parallel.data_parallel == "fsdp" else config.train.precision
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        params_dtype=DTYPES[precision],
        initial_loss_scale=config.train.loss_scale,
        min_loss_scale=LEAST_LOSS_SCALE,
        loss_scale_window=config.train.loss_scale_window,
        hysteresis=1,
        use_distributed_optimizer=is_distributed,
        overlap_param_gather=is_distributed and config.parallel.overlap_param_gather,
    )


def _muon(config: RunConfig, parts: Sequence[DataParallel]) -> LayerWiseDistributedOptimizer:
    settings, megatron_config = config.optimizer, _megatron_config(config)
    processes = ProcessGroupCollection.use_mpu_process_groups()
    named = list(named_parameters(parts))
    matrices = [parameter for name, parameter in named if uses_muon(name, parameter)]
    others = [parameter for name, parameter in named if not uses_muon(name, parameter)]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        muon = {"momentum": settings.muon_momentum, "tensor_group": processes.tp}
        optimizers.append(Muon(_groups(matrices, settings), lr=settings.lr, weight_decay=settings.weight_decay, **muon))
    if others:  # an adapter may have none
        adamw = {"betas": (settings.adam_beta1, settings.adam_beta2), "eps": settings.adam_eps, "fused": True}
        optimizers.append(
            torch.optim.AdamW(_groups(others, settings), lr=settings.lr, weight_decay=settings.weight_decay, **adamw)
        )
    return LayerWiseDistributedOptimizer(
        [FP32Optimizer(optimizer, megatron_config, _no_state) for optimizer in optimizers],
        megatron_config,
        processes,
        init_state_fn_list=[_no_state] * len(optimizers),
    )


def _groups(parameters: list[nn.Parameter], settings: OptimizerConfig) -> list[dict]:
    """Groups of matrices and of vectors (without weight decay), if any, as Megatron's scheduler expects them."""
    parts = ((1.0, lambda parameter: parameter.ndim > 1), (0.0, lambda parameter: parameter.ndim <= 1))
    groups = []
    for wd_mult, belongs in parts:
        members = [parameter for parameter in parameters if belongs(parameter)]
        if members:
            groups.append({"params": members, "wd_mult": wd_mult, "max_lr": settings.lr, "min_lr": settings.min_lr})
    return groups


def _no_state(optimizer: torch.optim.Optimizer, config: MegatronOptimizerConfig | None = None) -> None:
    """State initialization that does nothing: state appears with the first step, or is restored by
    `train.optim.state`."""
