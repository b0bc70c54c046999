"""Construction of the model chunks of a rank, with initial weights and data-parallel wrappers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megadit.models.lora.adapters import adapter_key, attach, initial_adapter_value, train_adapter_only
from megadit.models.machine import free_memory
from megadit.models.megatron.blocks import LINEARS, LinearKind, arrange_blocks
from megadit.models.megatron.groups import Groups
from megadit.models.megatron.linears.gradient_sums import give_megatron_a_product, leave_unzeroed
from megadit.models.megatron.linears.int8 import eight_bits
from megadit.models.megatron.parallelize import parallelize
from megadit.models.megatron.shards import initialize_dit_
from megadit.models.megatron.transformer_config import transformer_config
from megadit.models.networks import initialize
from megadit.models.networks.dit import Chunk
from megadit.models.networks.registry import build_network
from megadit.models.shared.resources import memory_in_words
from megadit.models.storage.components import network_shapes
from megadit.train.checkpoints.init_from import InitialWeights, Weights
from megadit.train.config.schema import RunConfig
from megadit.train.engine.fully_sharded import FullySharded, share_base
from megadit.train.objectives.heads import Adversary
from megadit.train.objectives.networks import TrainingModel
from megadit.train.objectives.registry import objective_of
from megadit.train.optim.optimizer import precision, uses_distributed_optimizer
from megadit.train.optim.state import DataParallel, assign
from megadit.train.plan.memory import choice_in_words, needed_memory, with_recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Options of building a network."""

    is_frozen: bool = False
    """Whether it is used for inference only."""
    has_adapter: bool = True
    """Whether adapters are attached if the run has `train.adapter`."""
    has_adversary: bool = False
    """Whether it has a discriminator head, which classifies samples as real or generated."""
    base: nn.Module | None = None
    """Model chunk of another network on this rank, with which all weights except adapters are shared."""


TRAINED = Form()


def network_of(part: nn.Module) -> TrainingModel:
    """A model chunk without its data-parallel wrapper (frozen networks may have none)."""
    return part.module if isinstance(part, DataParallel) else part


def starting_values(config: RunConfig, initial: InitialWeights | None) -> Weights:
    """Return a function from a parameter's name to its whole initial value: from `initial`, or drawn from the seed."""
    model, seed, adapter = config.model, config.train.seed, config.train.adapter
    shapes = network_shapes(model)

    def base(name: str) -> Tensor:
        return initialize.initial_value(name, torch.Size(shapes[name]), seed) if initial is None else initial.read(name)

    held = eight_bits(base) if config.train.base_is_int8 else base

    def value(name: str) -> Tensor:
        if (key := adapter_key(name)) is None:
            return held(name)
        if initial is not None and initial.adapter is not None:
            return initial.adapter[key]
        return initial_adapter_value(key, model, adapter.rank, seed=seed, base=held, dtype=precision(config))

    return value


def build_chunks(config: RunConfig, groups: Groups, weights: Weights, form: Form = TRAINED) -> tuple[DataParallel, ...]:
    """This rank's model chunks in data-parallel wrappers, which sum gradients in float32, for Megatron's schedules. A
    frozen network is wrapped only if it is sharded.
    """
    config = _with_recompute(config, groups)
    sizes, is_sharded = config.parallel.sizes, config.parallel.data_parallel == "fsdp"
    if config.parallel.gradient_accumulation_fusion and config.parallel.transformer_impl == "local":
        give_megatron_a_product()
    # FSDP shards float32 weights, and gathers them in the precision of the computation
    dtype = torch.float32 if is_sharded else precision(config)
    megatron = transformer_config(
        config.model,
        sizes,
        dtype=dtype,
        gradient_accumulation_fusion=config.parallel.gradient_accumulation_fusion,
        fp8=None if config.train.fp8 == "none" else config.train.fp8,
        fp8_recipe=config.train.fp8_recipe,
    )
    if is_sharded:
        parts = (_shard(config, groups, megatron, weights, form),)
    else:
        indices = [turn * sizes.pipeline + groups.pipeline.rank() for turn in range(sizes.virtual_pipeline)]
        networks = [
            _initialized(config, groups, megatron, index, weights, form).to(groups.device, dtype) for index in indices
        ]
        if form.is_frozen:
            return tuple(network.requires_grad_(False) for network in networks)
        parts = tuple(_replicate(config, megatron, network, turn) for turn, network in enumerate(networks))
    megatron.finalize_model_grads_func = finalize_model_grads
    megatron.no_sync_func = parts[0].no_sync if len(parts) == 1 else [part.no_sync for part in parts]
    return parts


def _with_recompute(config: RunConfig, groups: Groups) -> RunConfig:
    """`config` with `recompute_granularity=auto` resolved, by the rank with the least free memory.

    All ranks must agree, because recomputed blocks repeat their collectives.
    """
    if config.parallel.recompute_granularity != "auto":
        return config
    free = least_free_memory(groups)
    decided = with_recompute(config, groups.world_size, free)
    if groups.is_first:
        needed = memory_in_words(needed_memory(decided, groups.world_size))
        print(
            f"recomputing {choice_in_words(decided)}: about {needed} of {memory_in_words(free)} are needed", flush=True
        )
    return decided


def least_free_memory(groups: Groups) -> float:
    """Free bytes of the rank that has least; all ranks call this."""
    free = torch.tensor(float(free_memory(groups.device)), dtype=torch.float64, device=groups.device)
    dist.all_reduce(free, dist.ReduceOp.MIN)
    return free.item()


def _shard(
    config: RunConfig, groups: Groups, megatron: TransformerConfig, weights: Weights, form: Form
) -> FullySharded:
    """The network sharded by FSDP; no rank ever holds more than its shard and one whole tensor."""
    network = _build_network(config, groups, megatron, 0, form, torch.device("meta"))
    if form.is_frozen:
        network.requires_grad_(False)
    part = FullySharded(megatron, network, groups, precision(config), form.base)
    initialize_dit_(network.dit, config.train.seed, groups.axes, weights, assign=assign, selects=_own(form))
    return part


def _initialized(
    config: RunConfig, groups: Groups, megatron: TransformerConfig, index: int, weights: Weights, form: Form
) -> TrainingModel:
    """Model chunk `index` with its initial weights, which are the same in any layout."""
    device = groups.device if form.base is None else torch.device("meta")
    network = _build_network(config, groups, megatron, index, form, device)
    if form.base is not None:
        share_base(network, form.base, groups.device)
    initialize_dit_(network.dit, config.train.seed, groups.axes, weights, selects=_own(form))
    return network


def _own(form: Form) -> Callable[[str], bool]:
    """Predicate of names: whether a parameter is the network's own (not shared) and still without values."""
    return lambda name: form.base is None or adapter_key(name) is not None


def _kind_of_linears(config: RunConfig) -> LinearKind:
    if config.train.base_is_int8:
        return "int8"
    own_fp8 = config.train.fp8 != "none" and config.parallel.transformer_impl == "local"
    return "fp8" if own_fp8 else config.parallel.transformer_impl


def _build_network(
    config: RunConfig, groups: Groups, megatron: TransformerConfig, index: int, form: Form, device: torch.device
) -> TrainingModel:
    """Model chunk `index`; DiT weights are uninitialized, and on the meta device take no memory."""
    parallel = config.parallel
    with torch.device("meta"):
        dit = build_network(config.model, Chunk(index, parallel.sizes.num_chunks))
        if config.train.adapter is not None and form.has_adapter:
            attach(dit, config.train.adapter)
    impl = _kind_of_linears(config)
    parallelize(dit, megatron, groups, device=device, split=LINEARS[impl])
    arrange_blocks(
        dit,
        megatron,
        impl,
        recompute=parallel.recompute_granularity,
        recompute_num_layers=parallel.recompute_num_layers,
        cpu_offloading_num_layers=parallel.cpu_offloading_num_layers,
        cuda_graph_max_segments=parallel.cuda_graph_max_segments,
    )
    if config.train.adapter is not None:
        train_adapter_only(dit, precision(config))
    with groups.device:
        return TrainingModel(
            dit,
            config,
            objective_of(config),
            megatron,
            readers=groups.readers,
            context=groups.context.group,
            adversary=Adversary(config.model.hidden_size, config.train.seed) if form.has_adversary else None,
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
    # later chunks are reduced while earlier ones are computed: their gradients need no smaller buckets
    part = DistributedDataParallel(megatron, settings, network, disable_bucketing=turn > 0)
    leave_unzeroed(part)
    return part
