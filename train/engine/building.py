"""The parts of a network that a rank holds, wrapped for data parallelism, with the weights that they start from."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megadit.models.lora.adapters import adapter_key, attach, initial_adapter_value, train_adapter_only
from megadit.models.machine import free_memory
from megadit.models.megatron.groups import Groups
from megadit.models.megatron.linears.gradient_sums import give_megatron_a_product, leave_unzeroed
from megadit.models.megatron.linears.int8 import eight_bits
from megadit.models.megatron.parallelize import LinearKind, parallelize
from megadit.models.megatron.shards import initialize_dit_
from megadit.models.megatron.transformer_config import transformer_config
from megadit.models.networks import initialize
from megadit.models.networks.dit import Chunk
from megadit.models.networks.registry import build_network
from megadit.models.shared.memory import memory_in_words
from megadit.models.storage.weights import network_shapes
from megadit.train.checkpoints.init_from import InitialWeights, Weights
from megadit.train.config.schema import RunConfig
from megadit.train.distill.adversary import Adversary
from megadit.train.engine.fully_sharded import FullySharded
from megadit.train.engine.model import TrainingModel
from megadit.train.engine.shared_base import share_base
from megadit.train.optim.optimizer import precision, uses_distributed_optimizer
from megadit.train.optim.state import DataParallel, assign
from megadit.train.plan.recompute import choice_in_words, needed_memory, with_recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a network is built."""

    is_frozen: bool = False
    """It is used for inference only."""
    has_adapter: bool = True
    """Adapters are attached where the run has `train.adapter`."""
    has_adversary: bool = False
    """It has a head that classifies samples as real or generated."""
    base: nn.Module | None = None
    """Model chunk of another network on this rank; the two share all weights but their adapters."""


TRAINED = Form()


def network_of(part: nn.Module) -> TrainingModel:
    """A part without its wrapper for data parallelism, which a frozen one may lack."""
    return part.module if isinstance(part, DataParallel) else part


def starting_values(config: RunConfig, initial: InitialWeights | None) -> Weights:
    """Return a function from a parameter's name to its whole initial value: of `given`, or drawn from the seed."""
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
    """This rank's parts of the network, ready for Megatron's schedules: gradients are summed in float32. A frozen
    network is wrapped only where it is sharded.
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
    """`config` with `recompute_granularity=auto` decided, by the rank with the least free memory.

    All ranks must agree: recomputed blocks repeat what ranks say to each other.
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
    """Bytes that the rank with the least can still take; all ranks call this."""
    free = torch.tensor(float(free_memory(groups.device)), dtype=torch.float64, device=groups.device)
    dist.all_reduce(free, dist.ReduceOp.MIN)
    return free.item()


def _shard(
    config: RunConfig, groups: Groups, megatron: TransformerConfig, weights: Weights, form: Form
) -> FullySharded:
    """The network divided among the ranks, none of which ever holds more than its share and one whole tensor."""
    network = _build_network(config, groups, megatron, 0, form, torch.device("meta"))
    if form.is_frozen:
        network.requires_grad_(False)
    part = FullySharded(megatron, network, groups, precision(config), form.base)
    initialize_dit_(network.dit, config.train.seed, groups.axes, weights, assign=assign, selects=_own(form))
    return part


def _initialized(
    config: RunConfig, groups: Groups, megatron: TransformerConfig, index: int, weights: Weights, form: Form
) -> TrainingModel:
    """Part `index` of the network, with the weights that it has in any layout."""
    device = groups.device if form.base is None else torch.device("meta")
    network = _build_network(config, groups, megatron, index, form, device)
    if form.base is not None:
        share_base(network, form.base, groups.device)
    initialize_dit_(network.dit, config.train.seed, groups.axes, weights, selects=_own(form))
    return network


def _own(form: Form) -> Callable[[str], bool]:
    """Whether a parameter of this name is the network's own, and has no values yet."""
    return lambda name: form.base is None or adapter_key(name) is not None


def _kind_of_linears(config: RunConfig) -> LinearKind:
    if config.train.base_is_int8:
        return "int8"
    own_fp8 = config.train.fp8 != "none" and config.parallel.transformer_impl == "local"
    return "fp8" if own_fp8 else config.parallel.transformer_impl


def _build_network(
    config: RunConfig, groups: Groups, megatron: TransformerConfig, index: int, form: Form, device: torch.device
) -> TrainingModel:
    """Part `index` of the network; of the DiT no values, and on the meta device no memory."""
    parallel = config.parallel
    with torch.device("meta"):
        dit = build_network(config.model, Chunk(index, parallel.sizes.num_chunks))
        if config.train.adapter is not None and form.has_adapter:
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
    # parts that come later are reduced while earlier ones are computed: their gradients need no smaller buckets
    part = DistributedDataParallel(megatron, settings, network, disable_bucketing=turn > 0)
    leave_unzeroed(part)
    return part
