"""Estimated peak memory of one rank, and the fewest blocks to recompute with which a run fits
(`parallel.recompute_granularity=auto`).

Letters: S video tokens and L text tokens of a micro-batch on this rank, D width, A width of all heads, M hidden values
of a token in the MLP (of both factors of SwiGLU).
"""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from megadit.models.lora.adapters import chosen_targets
from megadit.models.ops.ledger import SMALL
from megadit.train.config.schema import RunConfig
from megadit.train.objectives.heads import head_parameters
from megadit.train.plan.layout import Layout
from megadit.train.plan.work import Parameters, count_parameters, count_trained, num_self_attentions, num_sublayers

RESERVE = 0.06
"""Fraction of a GPU's memory for CUDA, NCCL and fragmentation."""
MARGIN = 0.1
"""Fraction of the available memory that is left free, because estimates are accurate to a tenth."""
SMALLER = (
    "more ranks or GPUs, `megadit train --plan --gpus N --gpu NAME` for a layout that fits, a smaller model, "
    "data.seq_length or data.micro_batch_size reduce it"
)
"""Remedies for a run that does not fit into memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Peak memory of one rank in bytes, by category."""

    parameters: float
    """Weights, and their FP8 codes that a step keeps."""
    gradients: float
    optimizer: float
    ema_weights: float
    activations: float
    """Activations stored for the backward, of all micro-batches in flight."""
    passing: float
    """Largest temporary memory: gradients within a layer, a recomputed layer, gathered weights."""
    offloaded: float = 0.0
    """Activations in host memory."""

    @property
    def total(self) -> float:
        """All but the host's."""
        return self.parameters + self.gradients + self.optimizer + self.ema_weights + self.activations + self.passing


def memory_of(config: RunConfig, layout: Layout) -> Memory:
    """Memory of a rank of the first pipeline stage, which has most micro-batches in flight."""
    trained, head, learners = count_trained(config), _head(config), _num_learners(config)
    is_spread, stored_per_layer = spreads_optimizer(config, layout), layer_bytes(config, layout)
    # with a discriminator, both generated and real samples go through the critic, and the student's step through both
    learnt = learners * _stored(trained, layout) + _stored(head, layout)

    def updated(parameters: Parameters) -> float:
        """Number of parameters whose optimizer state a rank holds."""
        return parameters.share(layout) if is_spread else _whole(parameters, layout)

    return Memory(
        parameters=_frozen_bytes(config, layout) + _size(config) * learnt + _cached_codes(config, layout),
        gradients=(4 + _recorded_gradient_bytes(config)) * learnt,
        optimizer=_optimizer_bytes(config) * (learners * updated(trained) + updated(head)),
        ema_weights=4 * len(config.ema.sigma_rels) * trained.share(layout),
        activations=(1 + (head.total > 0)) * _stored_activations(config, layout, stored_per_layer),
        passing=_passing(config, layout, stored_per_layer),
        offloaded=_in_flight(layout) * offloaded_bytes(config, layout),
    )


def _cached_codes(config: RunConfig, layout: Layout) -> float:
    """Bytes of the FP8 codes of weights, and of their transposes, that a step keeps."""
    return 2 * fp8_weights(config, layout) if config.train.fp8_weight_cache else 0.0


def fp8_weights(config: RunConfig, layout: Layout) -> float:
    """Number of weights that a rank multiplies in FP8."""
    is_fp8 = config.train.fp8 != "none"
    return count_parameters(config.model).split / layout.tensor / layout.pipeline if is_fp8 else 0.0


def _recorded_gradient_bytes(config: RunConfig) -> int:
    """Bytes per parameter of the gradient buffers of CUDA graphs."""
    return 0 if config.parallel.cuda_graph_max_segments is None else _size(config)


def _base_bytes(config: RunConfig, layout: Layout) -> float:
    """Bytes of a frozen network; in an int8 base, matrices divided by tensor parallelism take one byte per number
    (their scales, one per row, are negligible)."""
    base = count_parameters(config.model)
    in_int8 = base.split / layout.tensor / layout.pipeline if config.train.base_is_int8 else 0.0
    return _size(config) * (_stored(base, layout) - in_int8) + in_int8


def _num_learners(config: RunConfig) -> int:
    """Number of trained networks, or of those with a trained adapter."""
    distill = config.train.distill
    return 1 if distill is None or not distill.has_critic else 2


def _head(config: RunConfig) -> Parameters:
    """Parameters of the discriminator head of a critic."""
    distill, width = config.train.distill, config.model.hidden_size
    has_head = distill is not None and distill.has_adversary
    return Parameters(split=0, whole=0, outside=head_parameters(width) if has_head else 0)


def _frozen_bytes(config: RunConfig, layout: Layout) -> float:
    """Bytes of frozen weights: an adapter's base and a teacher, counted once if they are the same."""
    kinds = (config.train.adapter is not None) + (config.train.distill is not None)
    return (1 if config.has_one_base else kinds) * _base_bytes(config, layout)


def _whole(parameters: Parameters, layout: Layout) -> float:
    return parameters.of_rank(layout) + parameters.experts_of_rank(layout)


def _stored(parameters: Parameters, layout: Layout) -> float:
    """Number of parameters that a rank holds between steps."""
    return parameters.share(layout) if layout.data_parallel == "fsdp" else _whole(parameters, layout)


def spreads_optimizer(config: RunConfig, layout: Layout) -> bool:
    """Whether optimizer state is sharded over ranks that hold the same parameters."""
    return layout.data_parallel != "ddp" or _is_muon(config)


def _size(config: RunConfig) -> int:
    return 2 if config.train.is_half else 4


def _is_muon(config: RunConfig) -> bool:
    return config.optimizer.optimizer == "muon"


def _optimizer_bytes(config: RunConfig) -> int:
    """Bytes per parameter: a float32 master copy of bf16 weights, and one (Muon) or two (AdamW) moments."""
    moments = 4 if _is_muon(config) or config.optimizer.moments == "bf16" else 8
    return (4 if config.train.is_half else 0) + moments


def _tokens(config: RunConfig, layout: Layout) -> tuple[float, float]:
    """Video tokens and text tokens of a micro-batch on one context-parallel rank; text is not divided."""
    packs = layout.micro_batch_size
    return packs * config.data.seq_length / layout.context, packs * config.data.text_seq_length


def layer_bytes(config: RunConfig, layout: Layout) -> float:
    """Bytes that one block stores for its backward.

    Per token: input of the norm before each sublayer and output of the sublayer (6 D for three); for self-attention q,
    k and v as projected, q and k as normalised, and the result (6 A); for cross-attention q twice and the result (3 A);
    the MLP's hidden values (M). Cheap values are recomputed, unless they are small: outputs of norms, concatenated
    results of attention, activated hidden values (3 D + 2 A + M). Per text token: k twice and v (3 A).

    With an adapter gates are frozen, so that the outputs of the sublayers (3 D) are not stored for their gradients.
    """
    (S, L), model, t = _tokens(config, layout), config.model, layout.tensor
    cut = t if layout.sequence_parallel else 1
    D, A, M = model.hidden_size / cut, model.attention_size / t, _hidden_values(config, layout)
    own, sublayers = num_self_attentions(model), num_sublayers(model)
    of_sublayer = 2 if _gates_learn(config) else 1
    numbers = S * (of_sublayer * sublayers * D + (6 * own + 3) * A + M) + L * 3 * A
    for count, width in ((sublayers, D), (own + 1, A), (1, M)):
        if S * width < SMALL:
            numbers += count * S * width
    # means and roots of norms, sums of softmax
    statistics = 4 * S * (2 * sublayers / cut + (3 * own + 2) * model.num_attention_heads / t)
    return _size(config) * numbers + statistics


def _gates_learn(config: RunConfig) -> bool:
    """Whether the modulation of blocks is trained."""
    if config.train.adapter is None:
        return True
    of_condition = ("blocks.*.modulation.*", "sigma_embedder.*", "fps_embedder.*", "guidance_embedder.*", "shared_*")
    targets = chosen_targets(config.model, config.train.adapter.targets)
    return any(fnmatchcase(name, pattern) for name in targets for pattern in of_condition)


def _hidden_values(config: RunConfig, layout: Layout) -> float:
    """Hidden values of the MLP per token; with experts also their copies of the token and outputs."""
    model, experts = config.model, config.model.experts
    if not experts.num_experts:
        return model.mlp_rows / layout.tensor
    of_expert = model.mlp_factors * model.expert_size / layout.expert_tensor + 2 * model.hidden_size
    # experts receive as many tokens as their rank sends to others, times the ranks that share their matrices
    tokens = layout.expert_tensor / (layout.tensor if layout.sequence_parallel else 1)
    shared = model.mlp_factors * experts.shared_ffn_hidden_size / layout.tensor
    return experts.experts_per_token * of_expert * tokens + shared


def _block_input_bytes(config: RunConfig, layout: Layout) -> float:
    tokens, _ = _tokens(config, layout)
    return _size(config) * tokens * config.model.hidden_size / (layout.tensor if layout.sequence_parallel else 1)


def _in_flight(layout: Layout) -> float:
    """Micro-batches in flight on the first stage, in units of all layers of a rank."""
    p, v = layout.pipeline, layout.virtual_pipeline
    waiting = p if v == 1 else p * (1 + (p - 1) / (p * v))
    return min(waiting, layout.num_micro_batches)


def offloaded_bytes(config: RunConfig, layout: Layout) -> float:
    """Bytes of activations of a micro-batch that a rank copies to host memory, and back."""
    return layout.offloaded_share * config.model.num_layers / layout.pipeline * layer_bytes(config, layout)


def _stored_activations(config: RunConfig, layout: Layout, stored_per_layer: float) -> float:
    model = config.model
    layers = model.num_layers / layout.pipeline
    share = layout.recompute_share if layout.recompute == "full" else 0.0
    # recomputed attention (`selective`) saves almost nothing: its result is stored for the following projection
    per_layer = share * _block_input_bytes(config, layout) + (1 - share - layout.offloaded_share) * stored_per_layer
    tokens, text = _tokens(config, layout)
    # outside the blocks: x0, noise, their sum and the prediction in float32; text features and their embedding
    outside = tokens * 5 * 4 * model.patch_dim + text * (
        4 * model.crossattn_emb_size + 2 * _size(config) * model.hidden_size
    )
    return _in_flight(layout) * per_layer * layers + outside


def _passing(config: RunConfig, layout: Layout, stored_per_layer: float) -> float:
    """The larger of the temporary memory of a block's backward and of the optimizer's step."""
    model = config.model
    tokens, _ = _tokens(config, layout)
    D, A, M = model.hidden_size, model.attention_size / layout.tensor, _hidden_values(config, layout)
    # gradients of q, k, v before and after their norms, of the result, and of the stream; or those of the MLP
    backward = _size(config) * max(tokens * (8 * A + 2 * D), min(tokens, 8192) * 3 * M + tokens * 3 * D)
    if layout.recompute == "full":
        backward += stored_per_layer
    if layout.offloaded_share:  # of the block that computes, and of the one before it
        backward += 2 * stored_per_layer
    if config.train.base_is_int8:  # a matrix as it is made for its product: its codes, and these times their steps
        backward += 2 * _size(config) * D * model.mlp_rows / layout.tensor
    if layout.data_parallel == "fsdp":  # two blocks gathered, the gradients of one before they are scattered
        backward += 2 * _size(config) * _of_block(count_parameters(model), config, layout)
        backward += 4 * _of_block(count_trained(config), config, layout)
    return backward


def _of_block(parameters: Parameters, config: RunConfig, layout: Layout) -> float:
    """Number of parameters of one block with which a rank computes."""
    experts = parameters.experts / (layout.expert * layout.expert_tensor)
    return (parameters.split / layout.tensor + parameters.whole + experts) / config.model.num_layers


def with_recompute(config: RunConfig, ranks: int, available: float) -> RunConfig:
    """`config` with `auto` resolved for ranks that have `available` bytes each; any other value is left unchanged.

    The fewest blocks of each model chunk are recomputed with which the estimate of `memory_of` fits; all, if none do.
    """
    if config.parallel.recompute_granularity != "auto":
        return config
    layers_per_chunk = config.model.num_layers // config.parallel.sizes.num_chunks
    choices = (_recomputing(config, count) for count in range(layers_per_chunk + 1))
    fits = (one for one in choices if needed_memory(one, ranks) <= available * (1 - MARGIN))
    return next(fits, _recomputing(config, layers_per_chunk))


def needed_memory(config: RunConfig, ranks: int) -> float:
    """Estimated bytes that each rank needs."""
    return memory_of(config, Layout.of(config, ranks)).total


def choice_in_words(config: RunConfig) -> str:
    """Describe the choice of `with_recompute`."""
    parallel = config.parallel
    layers_per_chunk = config.model.num_layers // parallel.sizes.num_chunks
    count = 0 if parallel.recompute_granularity == "none" else parallel.recompute_num_layers or layers_per_chunk
    return f"{count} of {layers_per_chunk} blocks"


def _recomputing(config: RunConfig, count: int) -> RunConfig:
    """`config` with `count` recomputed blocks in each model chunk."""
    choice = {"recompute_granularity": "full" if count else "none", "recompute_num_layers": count or None}
    return replace(config, parallel=replace(config.parallel, **choice))
