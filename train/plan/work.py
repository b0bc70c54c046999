"""Computation, communication and memory of one rank in one optimizer step, counted from a configuration.

One typical pack represents all packs of a run: filled with the sizes of `data.mock_latent_shapes` in turn, with its
text tokens divided evenly. Ranks differ slightly (first and last pipeline stage, texts); values are those of the
fullest one.

Letters: S tokens of a micro-batch, D width, A width of all heads, M width of the MLP; t, p, c, d the sizes of the
tensor-, pipeline-, context- and data-parallel groups.
"""

import itertools
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod

import torch

from megadit.models.bundle import Bundle
from megadit.models.configs.adapter import AdapterConfig
from megadit.models.configs.config import DiTConfig
from megadit.models.flops import attention_flops, training_flops
from megadit.models.lora.adapters import adapter_key, attach
from megadit.models.megatron.plan import role_of
from megadit.models.networks.registry import build_network
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.models.shared.files import is_bundle
from megadit.train.config.schema import RunConfig
from megadit.train.plan.layout import Layout

SATURATING_LENGTH = 830
"""Tokens of a sample with which a GPU's attention reaches half of its best rate: cuDNN's kernel and FlashAttention-2's,
forward and backward, at 1,024 and 8,192 tokens on the H100 of `train/BENCHMARKS.md`."""
HEAD_SIZES = (32, 64, 96, 128, 192, 256)
"""Sizes of heads that FlashAttention-2 has kernels for; others are padded to the next."""
ELEMENTWISE_ACCESSES = 100 / 3
"""Memory accesses per token and channel for a sublayer outside its matrix products (norms, modulation, gates, rotation,
activation, forward and backward); counted from the DiT's block, accurate to a third."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Numbers of parameters, by their treatment in tensor parallelism."""

    split: int
    """Parameters of blocks that are divided among tensor-parallel ranks."""
    whole: int
    """Parameters of blocks that every tensor-parallel rank holds."""
    outside: int
    """Parameters of embedders and the final layer, held by every rank."""
    experts: int = 0
    """Parameters of experts in the blocks, divided among expert-parallel ranks."""

    @property
    def total(self) -> int:
        return self.split + self.whole + self.outside + self.experts

    def of_rank(self, layout: Layout) -> float:
        """Parameters with which a rank computes, except experts; FSDP shards their storage further."""
        return (self.split / layout.tensor + self.whole) / layout.pipeline + self.outside

    def experts_of_rank(self, layout: Layout) -> float:
        """Expert parameters with which a rank computes."""
        return self.experts / (layout.expert * layout.expert_tensor * layout.pipeline)

    def share(self, layout: Layout) -> float:
        """Parameters that a rank owns if they are sharded over data-parallel ranks (FSDP, distributed optimizer)."""
        return self.of_rank(layout) / (layout.data * layout.context) + self.experts_of_rank(layout) / layout.expert_data


@lru_cache(maxsize=64)
def count_parameters(model: DiTConfig, adapter: AdapterConfig | None = None) -> Parameters:
    """Count the parameters of a network, or of an `adapter` on it.

    Counted on the meta device: the network is built in full and takes no memory.
    """
    with torch.device("meta"):
        dit = build_network(model)
    if adapter is not None:
        attach(dit, adapter)
    counts = {"split": 0, "whole": 0, "outside": 0, "experts": 0}
    for name, parameter in dit.named_parameters():
        if adapter is None or adapter_key(name) is not None:
            counts[_kind(name)] += parameter.numel()
    return Parameters(**counts)


def count_trained(config: RunConfig) -> Parameters:
    """Count the parameters with gradients, optimizer state and EMA: the network's, or those of `train.adapter`."""
    return count_parameters(config.model, config.train.adapter)


@cache
def _kind(name: str) -> str:
    if not name.startswith("blocks."):
        return "outside"
    role = role_of(name)
    if role.is_expert:
        return "experts"
    is_matrix = name.endswith(("weight", ".down", ".up"))
    return "split" if role.is_linear and is_matrix else "whole"


def typical_pack(config: RunConfig) -> PackLayout:
    """One pack filled with the sizes of `data.mock_latent_shapes` in turn, as far as they fit."""
    grids, left = [], config.data.seq_length
    for shape in itertools.cycle(config.data.mock_latent_shapes):
        grid = config.model.sample_grid(*shape)
        if prod(grid) > left or len(grids) == config.data.text_seq_length:
            break
        grids.append(grid)
        left -= prod(grid)
    text = config.data.text_seq_length // max(1, len(grids))
    return PackLayout.pack(
        [Segment(grid, text) for grid in grids],
        capacity=config.data.seq_length,
        text_capacity=config.data.text_seq_length,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Work of one rank for one micro-batch (flops, bytes) or for one step (`data_*`)."""

    linear_flops: float
    """Flops of matrix products with weights, forward and backward."""
    linear_share: float
    """Fraction of `linear_flops` that is forward: a third if all weights are trained."""
    attention_flops: float
    attention_efficiency: float
    """See `attention_efficiency`."""
    elementwise_bytes: float
    """Bytes through device memory outside matrix products."""
    recompute: float
    """Fraction of the forward that the backward recomputes."""
    recompute_attention: float
    """Fraction of attention's forward that the backward recomputes."""
    tensor_bytes: float
    """Bytes that each rank sends in collectives of tensor and sequence parallelism."""
    exchange_bytes: float
    """Bytes of heads exchanged among context-parallel ranks."""
    ring_bytes: float
    """Bytes of keys and values exchanged among context-parallel ranks."""
    expert_bytes: float
    """Bytes of tokens sent to their experts, and of the outputs sent back."""
    pipeline_bytes: float
    data_reduce_bytes: float
    """Bytes of gradients to reduce, in float32."""
    data_gather_bytes: float
    """Bytes of weights to gather: after updates, or for FSDP before use."""

    @property
    def flops(self) -> float:
        return self.linear_flops + self.attention_flops


def work_of(config: RunConfig, layout: Layout) -> Work:
    """The work of one rank."""
    model, packs = config.model, layout.micro_batch_size
    pack = typical_pack(config)
    share = layout.tensor * layout.pipeline * layout.context
    attention = _attention_flops(pack, model) * packs / share
    tokens = packs * config.data.seq_length / layout.context  # of one context-parallel rank
    layers = model.num_layers / layout.pipeline
    forwards = _forwards_of_distillation(config)
    own_attention, attention = attention, attention * (1 + forwards / 3)
    linears = training_flops(pack, model, config.train.adapter, forwards) * packs / share - attention
    return Work(
        linear_flops=linears,
        linear_share=(training_flops(pack, model) * packs / share - own_attention) / 3 / linears,
        attention_flops=attention,
        attention_efficiency=attention_efficiency(pack, model, layout.ring),
        elementwise_bytes=_bytes_per_number(config)
        * ELEMENTWISE_ACCESSES
        * num_sublayers(model)
        * tokens
        * model.hidden_size
        * layers
        / (layout.tensor if layout.sequence_parallel else 1),
        recompute=layout.recompute_share if layout.recompute == "full" else 0.0,
        recompute_attention={"none": 0.0, "selective": 1.0, "full": layout.recompute_share}[layout.recompute],
        tensor_bytes=_tensor_bytes(config, layout, tokens) * layers,
        exchange_bytes=_context_bytes(config, layout, tokens)[0] * layers,
        ring_bytes=_context_bytes(config, layout, tokens)[1] * layers,
        expert_bytes=_expert_bytes(config, layout, tokens) * layers,
        pipeline_bytes=_pipeline_bytes(config, layout, tokens),
        **_data_bytes(config, layout),
    )


def _forwards_of_distillation(config: RunConfig) -> float:
    """Forward passes of teacher and critic; the teacher's bundle, if it exists here, says if it is
    guidance-distilled."""
    distill = config.train.distill
    if distill is None:
        return 0
    teacher = Bundle.open(distill.teacher).config if is_bundle(distill.teacher) else None
    return distill.forwards(distill.needs_two_passes(config.model, teacher))


def num_self_attentions(model: DiTConfig) -> int:
    return 3 if model.structure.block == "st_dit" else 1


def num_sublayers(model: DiTConfig) -> int:
    """Attentions and MLPs in a block."""
    return num_self_attentions(model) + (2 if model.structure.cross_attention else 1)


def upstream_flops(config: RunConfig) -> float:
    """Flops of one step by the formula of published throughputs."""
    return config.data.global_batch_size * upstream_pack_flops(typical_pack(config), config.model)


def upstream_pack_flops(pack: PackLayout, model: DiTConfig) -> float:
    """Flops by the formula 6 x parameters x tokens, plus self-attention, forward and backward.

    It counts the modulation, which is computed once per sample, as if it were computed for every token.
    """
    attention = 3 * sum(4 * s.num_tokens**2 * model.attention_size for s in _samples(pack)) * model.num_layers
    return 6 * count_parameters(model).total * sum(s.num_tokens for s in _samples(pack)) + attention


def _samples(pack: PackLayout) -> list[Segment]:
    return [segment for segment in pack.segments if not segment.is_padding]


def attention_efficiency(pack: PackLayout, model: DiTConfig, ring: int) -> float:
    """Fraction of a GPU's best rate that self-attention reaches with the samples of a pack, each shared by the ranks of
    a ring, and this size of heads."""
    lengths = [segment.num_tokens / ring for segment in _samples(pack)]
    of_lengths = sum(n**2 for n in lengths) / sum(n * (n + SATURATING_LENGTH) for n in lengths)
    size = model.dim_per_head
    return of_lengths * size / next((padded for padded in HEAD_SIZES if padded >= size), size)


def _attention_flops(pack: PackLayout, model: DiTConfig) -> float:
    """Flops of attention over a sample's tokens and its text, forward and backward."""
    return 3 * sum(attention_flops(segment, model) for segment in _samples(pack))


def _bytes_per_number(config: RunConfig) -> int:
    return 2 if config.train.is_half else 4


def _tensor_bytes(config: RunConfig, layout: Layout, tokens: float) -> float:
    """Bytes per layer: attentions and MLP all-gather tokens and reduce-scatter sums, forward and backward, and gather
    once more for the gradients of trained weights. All-reduces move the same without the last."""
    t = layout.tensor
    gathers_again = layout.sequence_parallel and config.train.adapter is None
    collectives = (5 if gathers_again else 4) * num_sublayers(config.model)
    return collectives * tokens * config.model.hidden_size * _bytes_per_number(config) * (t - 1) / t


def _context_bytes(config: RunConfig, layout: Layout, tokens: float) -> tuple[float, float]:
    """Bytes per layer: all-to-alls of q, k, v and the result among `head_exchange` ranks, forward and backward; keys
    and values once around the ring of the others, and again with their gradients in backward. Attention along one axis
    moves tokens to another division and back instead (a third move is free if frames divide among the ranks)."""
    width = config.model.attention_size / layout.tensor * _bytes_per_number(config)
    heads = layout.head_exchange
    exchange = 2 * 4 * tokens * width * (heads - 1) / heads
    if config.model.structure.block == "st_dit":
        cut = layout.tensor if layout.sequence_parallel else 1
        stream = config.model.hidden_size / cut * _bytes_per_number(config)
        exchange += 2 * 2 * tokens * stream * (layout.context - 1) / layout.context
    return exchange, 3 * 2 * tokens * width * (layout.ring - 1)


def _expert_bytes(config: RunConfig, layout: Layout, tokens: float) -> float:
    """Bytes per layer: tokens to their experts, gathered there among ranks that share one, and results back; forward
    and backward."""
    tokens *= config.model.experts.experts_per_token / (layout.tensor if layout.sequence_parallel else 1)
    times = (layout.expert - 1) / layout.expert + (layout.expert_tensor - 1)
    return 4 * tokens * config.model.hidden_size * _bytes_per_number(config) * times


def _pipeline_bytes(config: RunConfig, layout: Layout, tokens: float) -> float:
    """Bytes of activations to the next stage and gradients back, once per model chunk."""
    if layout.pipeline == 1:
        return 0.0
    if config.model.task == "match":
        tokens += layout.micro_batch_size * config.data.text_seq_length
    if config.train.distill is not None:
        tokens *= config.train.distill.num_networks_sent
    cut = layout.tensor if layout.sequence_parallel else 1
    return 2 * layout.virtual_pipeline * tokens * config.model.sent_size * _bytes_per_number(config) / cut


def _data_bytes(config: RunConfig, layout: Layout) -> dict[str, float]:
    """Bytes of gradients and weights over the d x c ranks that hold the same parameters."""
    share = _owned_by_others(count_trained(config), layout)
    size = _bytes_per_number(config)
    if layout.data_parallel == "fsdp":  # weights are gathered forward and backward, for every micro-batch
        times, gathered = layout.num_micro_batches, _owned_by_others(count_parameters(config.model), layout)
        return {"data_reduce_bytes": 4 * share * times, "data_gather_bytes": 2 * size * gathered * times}
    gather = size if layout.data_parallel == "distributed_optimizer" else 4  # an all-reduce: twice the gradients
    return {"data_reduce_bytes": 4 * share, "data_gather_bytes": gather * share}


def _owned_by_others(count: Parameters, layout: Layout) -> float:
    """Parameters with which a rank computes and that other ranks own."""
    return count.of_rank(layout) + count.experts_of_rank(layout) - count.share(layout)
