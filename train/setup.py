"""Everything a training run is made of, built from its configuration."""

import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from megadit.models.dit import DiT
from megadit.models.layers import LayerKit
from megadit.models.megatron import groups as process_groups
from megadit.models.megatron.groups import Groups
from megadit.models.megatron.mcore_layers import McoreLayers, initialize_dit_, transformer_config
from megadit.models.megatron.te_layers import TELayers
from megadit.models.support import UserError, atomic_path
from megadit.train.checkpoint_tensors import TrainedTensors
from megadit.train.config import MatmulPrecision, RunConfig, check_layout
from megadit.train.ema import WeightAverages
from megadit.train.loss import TrainingModel
from megadit.train.optimizer import build_optimizer, build_scheduler, uses_distributed_optimizer
from megadit.train.optimizer_state import find_ownership
from megadit.train.overrides import to_yaml


@dataclass(frozen=True, slots=True)
class Training:
    """The moving parts of a run."""

    config: RunConfig
    groups: Groups
    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    averages: WeightAverages
    tensors: TrainedTensors

    @property
    def network(self) -> TrainingModel:
        """The training model without Megatron's data-parallel wrapper."""
        return self.model.module

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step on this rank."""
        return self.config.data.global_batch_size // (self.config.data.micro_batch_size * self.groups.data.size())


def start_processes(config: RunConfig) -> Groups:
    """Threads, process groups and the folder of the run."""
    _quieten_megatron()
    check_layout(config, process_groups.world_size())
    _refuse_what_is_not_built(config)
    torch.set_num_threads(config.train.num_threads or _threads_per_rank())
    _set_matmul_precision(config.train.matmul_precision)
    groups = process_groups.initialize(config.parallel.sizes, config.model)
    if groups.is_first:
        folder = Path(config.train.output_dir)
        (folder / "samples").mkdir(parents=True, exist_ok=True)
        if not (folder / "validation_generation").exists():  # where users of NeMo and DFM look for these videos
            (folder / "validation_generation").symlink_to("samples", target_is_directory=True)
        with atomic_path(folder / "config.yaml") as temporary:
            temporary.write_text(to_yaml(config), encoding="utf-8")
    dist.barrier()
    return groups


def _refuse_what_is_not_built(config: RunConfig) -> None:
    parallel = config.parallel
    if parallel.sizes.pipeline * parallel.sizes.context > 1 or parallel.data_parallel == "fsdp":
        raise UserError("pipeline and context parallelism and fsdp can be planned, but not run yet")


def _set_matmul_precision(precision: MatmulPrecision) -> None:
    if precision != "ieee":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.mkldnn.matmul.fp32_precision = precision


def _quieten_megatron() -> None:
    """Megatron's notes on itself, and on names of torch functions that it has yet to follow, help no user."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*` is deprecated", category=FutureWarning)


def build_training(config: RunConfig, groups: Groups) -> Training:
    """The network with its initial weights, wrapped for data parallelism, its optimizer and its averages."""
    model = build_model(config, groups)
    optimizer = build_optimizer(config, model)
    ownership = find_ownership(optimizer, model, groups.data)
    averages = WeightAverages(config.ema.sigma_rels, ownership)
    return Training(
        config=config,
        groups=groups,
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        averages=averages,
        tensors=TrainedTensors(model.module, ownership, averages, groups),
    )


def build_model(config: RunConfig, groups: Groups) -> DistributedDataParallel:
    """The training model in Megatron's data-parallel wrapper: gradients are summed in float32."""
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    megatron = transformer_config(config.model, config.parallel.sizes, dtype=dtype)
    with torch.device(groups.device):
        dit = DiT(config.model, _layer_kit(config, megatron))
        network = TrainingModel(dit, config.diffusion, megatron, ModelType.encoder_or_decoder)
    initialize_dit_(dit, config.train.seed)
    model = DistributedDataParallel(
        megatron,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=groups.device.type == "cuda",
            use_distributed_optimizer=uses_distributed_optimizer(config),
        ),
        network.to(groups.device, dtype),
    )
    megatron.finalize_model_grads_func = finalize_model_grads
    megatron.no_sync_func = model.no_sync
    return model


def _layer_kit(config: RunConfig, megatron: TransformerConfig) -> LayerKit:
    kits = {"local": McoreLayers, "transformer_engine": TELayers}
    return kits[config.parallel.transformer_impl](megatron)


def _threads_per_rank() -> int:
    """The machine's cores divided among its ranks."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
