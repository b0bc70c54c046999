"""Everything a training run is made of, built from its configuration."""

import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megadit.models import initialize
from megadit.models.adapters import (
    adapter_key,
    attach,
    draw_dropout,
    fingerprint,
    initial_adapter_value,
    train_adapter_only,
)
from megadit.models.dit import Part
from megadit.models.machine import free_memory
from megadit.models.megatron import groups as process_groups
from megadit.models.megatron.gradient_sums import give_megatron_a_product, leave_unzeroed
from megadit.models.megatron.groups import Groups
from megadit.models.megatron.int8_linears import eight_bits
from megadit.models.megatron.parallelize import LinearKind, parallelize
from megadit.models.megatron.shards import initialize_dit_
from megadit.models.megatron.transformer_config import transformer_config
from megadit.models.networks import build_network
from megadit.models.shared.files import atomic_path
from megadit.models.weights import network_shapes
from megadit.train.checkpoint_tensors import TrainedTensors
from megadit.train.config.load import to_yaml
from megadit.train.config.rules import check_layout
from megadit.train.config.schema import EmaConfig, MatmulPrecision, RunConfig
from megadit.train.cpu_memory import keep_freed_memory
from megadit.train.device_update import DeviceUpdate, device_update
from megadit.train.distill.adversary import Adversary
from megadit.train.distill.networks import Distillation, denoiser_of, guided, judge_of, summed
from megadit.train.distill.objectives import Teaching
from megadit.train.ema import WeightAverages
from megadit.train.fully_sharded import FullySharded
from megadit.train.given_network import GivenNetwork, Weights, given_network, read_teacher
from megadit.train.optimizer import DTYPES, build_optimizer, build_scheduler, loss_scaler, uses_distributed_optimizer
from megadit.train.optimizer_state import DataParallel, assign, find_ownership, named_parameters
from megadit.train.plan.hardware import cores_of_a_rank
from megadit.train.plan.recompute import choice_in_words, needed_memory, with_recompute
from megadit.train.training_model import TrainingModel

CRITIC = "critic."
"""Before the names of a critic's tensors in checkpoints."""


@dataclass(frozen=True, slots=True)
class Training:
    """The moving parts of a run."""

    config: RunConfig
    groups: Groups
    parts: tuple[DataParallel, ...]
    """The parts of the network on this rank, in Megatron's data-parallel wrapper; several on an interleaved stage."""
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    averages: WeightAverages
    tensors: TrainedTensors
    base: str | None
    """`adapters.fingerprint` of the weights beside which an adapter is trained."""
    device_update: DeviceUpdate | None
    """What updates the weights in Megatron's place, on a GPU."""
    trained_as: str | None = None
    """`model.preconditioner` of the weights that training starts from."""
    distillation: Distillation | None = None
    """What the network learns from in place of its samples."""
    critic: "Training | None" = None
    """What learns beside a student how its videos are distributed."""

    @property
    def all_trained(self) -> "tuple[Training, ...]":
        """This run, and that of the critic beside it."""
        return (self,) if self.critic is None else (self, self.critic)

    @property
    def network(self) -> TrainingModel:
        """The first part on this rank, without its wrapper."""
        return self.parts[0].module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters on this rank that are trained, under their canonical names."""
        return named_parameters(self.parts)

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def begin_step(self, step: int) -> None:
        """Draws what a step draws for all of its samples: the dropout of an adapter, a student's number of calls."""
        if self.distillation is not None:
            self.distillation.begin(step, 0)
        adapter = self.config.train.adapter
        for part in self.parts if adapter is not None else ():
            draw_dropout(part.module.dit, adapter.dropout, seed=self.config.train.seed, step=step)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step on this rank."""
        return self.config.data.global_batch_size // (self.config.data.micro_batch_size * self.groups.readers.size())


def precision(config: RunConfig) -> torch.dtype:
    """The arithmetic of the network."""
    return DTYPES[config.train.precision]


def start_processes(config: RunConfig) -> Groups:
    """Threads, process groups and the folder of the run."""
    _quieten_megatron()
    check_layout(config, process_groups.world_size())
    torch.set_num_threads(config.train.num_threads or cores_of_a_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    _set_matmul_precision(config.train.matmul_precision)
    if not torch.cuda.is_available():
        keep_freed_memory()
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
    """The network with its initial weights, wrapped for data parallelism, its optimizer and its averages; of a student
    its teacher and critic, too."""
    training = _build_trained(config, groups, given_network(config))
    return training if config.train.distill is None else _with_teacher(training)


def _build_trained(
    config: RunConfig, groups: Groups, given: GivenNetwork | None, *, prefix: str = "", has_adversary: bool = False
) -> Training:
    """A network that is trained; `prefix` comes before the names of its tensors in checkpoints."""
    weights = None if given is None else given.read
    parts = build_parts(config, groups, _starting_weights(config, weights), has_adversary=has_adversary)
    optimizer = build_optimizer(config, parts)
    update = device_update(optimizer, parts)
    if update is not None:
        parts[0].config.finalize_model_grads_func = update.finalize
    if loss_scaler(optimizer) is not None:
        parts[0].config.grad_scale_func = optimizer.scale_loss
    ownership = find_ownership(optimizer, named_parameters(parts), groups)
    averages = WeightAverages(config.ema.sigma_rels, ownership)
    return Training(
        config=config,
        groups=groups,
        parts=parts,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        averages=averages,
        tensors=TrainedTensors(tuple(named_parameters(parts)), ownership, averages, groups, prefix),
        base=_fingerprint(config, weights),
        device_update=update,
        trained_as=None if given is None else given.config.preconditioner,
    )


def _with_teacher(training: Training) -> Training:
    """The run of a student, with its teacher and, where its objective asks for one, a critic that starts as the teacher
    does."""
    config, groups = training.config, training.groups
    asked, teacher = config.train.distill, read_teacher(config)
    critic = None
    if asked.has_critic:
        has_adversary = asked.has_adversary
        critic = _build_trained(_critic_config(config), groups, teacher, prefix=CRITIC, has_adversary=has_adversary)
    frozen = _build_frozen(config, groups, teacher)
    is_told = teacher.config.guidance_range is not None
    distillation = Distillation(
        frozen=frozen,
        seed=config.train.seed,
        teaching=Teaching(
            config=asked,
            diffusion=config.diffusion,
            model=config.model,
            teacher=denoiser_of(frozen) if is_told else guided(denoiser_of(frozen), asked.guidance),
            critic=None if critic is None else denoiser_of(critic.parts[0]),
            judge=None if critic is None else judge_of(critic.parts[0]),
            sum_over_context=partial(summed, group=groups.context.group),
            uncertainty=training.network.uncertainty,
        ),
        teacher_fingerprint=fingerprint(network_shapes(teacher.config), teacher.read),
        is_guided=not is_told and (asked.guidance != 1 or config.model.guidance_range is not None),
    )
    training.network.objective = distillation.loss
    if asked.has_adversary:
        critic.network.objective = distillation.critic_objective(critic.network.judge)
    others = () if critic is None else ((critic.tensors, asked.critic_updates),)
    tensors = replace(training.tensors, others=others)
    return replace(training, distillation=distillation, critic=critic, tensors=tensors)


def _critic_config(config: RunConfig) -> RunConfig:
    """The run of a critic: an ordinary one."""
    rate = config.train.distill.critic_lr or 2 * config.optimizer.lr
    return replace(
        config,
        train=replace(config.train, distill=None),
        optimizer=replace(config.optimizer, lr=rate),
        ema=EmaConfig(sigma_rels=()),
    )


def _build_frozen(config: RunConfig, groups: Groups, given: GivenNetwork) -> nn.Module:
    """A network that is only asked, laid out as that of the run is."""
    config = replace(config, model=given.config, train=replace(config.train, adapter=None, distill=None))
    (part,) = build_parts(config, groups, given.read, is_frozen=True)
    return part


def _fingerprint(config: RunConfig, given: Weights | None) -> str | None:
    if config.train.adapter is None or given is None:
        return None
    return fingerprint(network_shapes(config.model), given)


def _starting_weights(config: RunConfig, given: Weights | None) -> Weights:
    """What gives each parameter of the network its first value, whole: `given`, or drawn from the seed."""
    model, seed, adapter = config.model, config.train.seed, config.train.adapter
    shapes = network_shapes(model)

    def base(name: str) -> Tensor:
        return initialize.initial_value(name, torch.Size(shapes[name]), seed) if given is None else given(name)

    held = eight_bits(base) if config.train.base_is_int8 else base

    def value(name: str) -> Tensor:
        if (key := adapter_key(name)) is None:
            return held(name)
        return initial_adapter_value(key, model, adapter.rank, seed=seed, base=held, dtype=precision(config))

    return value


def build_parts(
    config: RunConfig, groups: Groups, weights: Weights, *, is_frozen: bool = False, has_adversary: bool = False
) -> tuple[DataParallel, ...]:
    """This rank's parts of the network, ready for Megatron's schedules: gradients are summed in float32. A frozen
    network is wrapped only where it is sharded; one that `has_adversary` has a head that tells real samples.
    """
    config = _with_recompute(config, groups)
    sizes, is_sharded = config.parallel.sizes, config.parallel.data_parallel == "fsdp"
    if config.parallel.gradient_accumulation_fusion and config.parallel.transformer_impl == "local":
        give_megatron_a_product()
    # what FSDP shards is float32: it gathers weights in the precision of the computation
    dtype = torch.float32 if is_sharded else precision(config)
    megatron = transformer_config(
        config.model,
        sizes,
        dtype=dtype,
        gradient_accumulation_fusion=config.parallel.gradient_accumulation_fusion,
        fp8=None if config.train.fp8 == "none" else config.train.fp8,
        fp8_recipe=config.train.fp8_recipe,
    )
    build = partial(_build_network, config, groups, megatron, has_adversary=has_adversary)
    if is_sharded:
        parts = (_shard(config, groups, build(0, torch.device("meta")), weights, is_frozen=is_frozen),)
    else:
        indices = [turn * sizes.pipeline + groups.pipeline.rank() for turn in range(sizes.virtual_pipeline)]
        networks = [
            _initialized(config, groups, build(index, groups.device), weights).to(groups.device, dtype)
            for index in indices
        ]
        if is_frozen:
            return tuple(network.requires_grad_(False) for network in networks)
        parts = tuple(_replicate(config, megatron, network, turn) for turn, network in enumerate(networks))
    megatron.finalize_model_grads_func = finalize_model_grads
    megatron.no_sync_func = parts[0].no_sync if len(parts) == 1 else [part.no_sync for part in parts]
    return parts


def _with_recompute(config: RunConfig, groups: Groups) -> RunConfig:
    """`config` with `recompute_granularity=auto` decided, by the rank with the least free memory.

    All ranks must agree: recomputed blocks repeat what ranks say to each other.
    """
    if config.parallel.recompute_granularity != "auto":
        return config
    free = torch.tensor(float(free_memory(groups.device)), dtype=torch.float64, device=groups.device)
    dist.all_reduce(free, dist.ReduceOp.MIN)
    decided = with_recompute(config, groups.world_size, free.item())
    if groups.is_first:
        needed, found = needed_memory(decided, groups.world_size) / 1e9, free.item() / 1e9
        print(f"recomputing {choice_in_words(decided)}: about {needed:.3g} of {found:.3g} GB are needed", flush=True)
    return decided


def _shard(
    config: RunConfig, groups: Groups, network: TrainingModel, weights: Weights, *, is_frozen: bool
) -> FullySharded:
    """The network divided among the ranks, none of which ever holds more than its share and one whole tensor."""
    if is_frozen:
        network.requires_grad_(False)
    part = FullySharded(network.config, network, groups, precision(config))
    initialize_dit_(network.dit, config.train.seed, groups.axes, weights, assign=assign)
    return part


def _initialized(config: RunConfig, groups: Groups, network: TrainingModel, weights: Weights) -> TrainingModel:
    """A part of the network, with the weights that it has in any layout."""
    initialize_dit_(network.dit, config.train.seed, groups.axes, weights)
    return network


def _kind_of_linears(config: RunConfig) -> LinearKind:
    if config.train.base_is_int8:
        return "int8"
    own_fp8 = config.train.fp8 != "none" and config.parallel.transformer_impl == "local"
    return "fp8" if own_fp8 else config.parallel.transformer_impl


def _build_network(
    config: RunConfig,
    groups: Groups,
    megatron: TransformerConfig,
    index: int,
    device: torch.device,
    *,
    has_adversary: bool,
) -> TrainingModel:
    """Part `index` of the network; of the DiT no values, and on the meta device no memory."""
    parallel = config.parallel
    with torch.device("meta"):
        dit = build_network(config.model, Part(index, parallel.sizes.num_parts))
        if config.train.adapter is not None:
            attach(dit, config.train.adapter)
    parallelize(
        dit,
        megatron,
        groups,
        device=device,
        impl=_kind_of_linears(config),
        recompute=parallel.recompute_granularity,
        recompute_num_layers=parallel.recompute_num_layers,
        cuda_graph_max_segments=parallel.cuda_graph_max_segments,
    )
    if config.train.adapter is not None:
        train_adapter_only(dit, precision(config))
    with groups.device:
        return TrainingModel(
            dit,
            config.diffusion,
            megatron,
            ModelType.encoder_or_decoder,
            label_smoothing=config.train.label_smoothing,
            contrast_rows=config.train.contrast_rows,
            readers=groups.readers,
            adversary=Adversary(config.model.hidden_size, config.train.seed) if has_adversary else None,
        )


def _replicate(
    config: RunConfig, megatron: TransformerConfig, network: TrainingModel, turn: int
) -> DistributedDataParallel:
    is_distributed = uses_distributed_optimizer(config)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=is_distributed and config.parallel.overlap_param_gather,
        use_distributed_optimizer=is_distributed,
    )
    # parts that come later are reduced while earlier ones are computed: their gradients need no smaller buckets
    part = DistributedDataParallel(megatron, settings, network, disable_bucketing=turn > 0)
    leave_unzeroed(part)
    return part
