"""Sizes of a parallel layout and their rules, independent of process groups (and of torch).

    world = tensor x context x data x pipeline = expert tensor x expert x expert data x pipeline

Tensor-parallel ranks split the matrices of a layer, context-parallel ranks the tokens of every sample, pipeline stages
the layers; together they hold one replica of the model, and data-parallel replicas read different samples.
Experts are split over other ranks, which hold different tokens: of one sample, or of several replicas of the model.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megadit.models.configs.config import DiTConfig
from megadit.models.shared.errors import Rule, UserError, first_broken, nearest_multiples

ContextComm = Literal["ulysses", "ring", "both"]

SETTINGS = {
    "tensor": "parallel.tensor_model_parallel_size",
    "pipeline": "parallel.pipeline_model_parallel_size",
    "virtual_pipeline": "parallel.virtual_pipeline_model_parallel_size",
    "context": "parallel.context_parallel_size",
    "context_comm": "parallel.context_parallel_comm",
    "sequence_parallel": "parallel.sequence_parallel",
    "expert": "parallel.expert_model_parallel_size",
    "expert_tensor": "parallel.expert_tensor_parallel_size",
    "fully_sharded": "parallel.data_parallel",
}
"""The setting of a run that decides each field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSizes:
    """Number of ranks along each dimension of parallelism; the rest of the world is data parallel."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    """Model chunks on each pipeline stage (virtual pipeline): more chunks, smaller bubbles."""
    context: int = 1
    context_comm: ContextComm = "ulysses"
    """Communication of context-parallel attention: heads (`ulysses`), keys and values (`ring`), or heads within groups
    as large as the number of heads allows, and keys and values between these (`both`)."""
    sequence_parallel: bool = False
    fully_sharded: bool = False
    """Parameters, gradients and optimizer state are sharded over data- and context-parallel ranks (FSDP)."""
    expert: int = 1
    """Ranks that hold different experts; tokens are sent to them."""
    expert_tensor: int = 1
    """Ranks that share the matrices of one expert."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise UserError(f"{SETTINGS[name]}={getattr(self, name)} must be 1 or more")

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together compute one replica of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def smallest_world(self) -> int:
        """The smallest number of ranks with whole replicas of the model and whole sets of its experts."""
        return self.pipeline * math.lcm(self.tensor * self.context, self.expert_ranks)

    @property
    def copies_work_together(self) -> bool:
        """Whether replicas of the model must compute at the same time, because each holds experts of the others."""
        ranks_of_copy = self.tensor * self.context  # consecutive, like the ranks of experts
        return self.fully_sharded or ranks_of_copy % self.expert_ranks > 0

    @property
    def num_chunks(self) -> int:
        """Number of model chunks, over all pipeline stages."""
        return self.pipeline * self.virtual_pipeline

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold one set of experts."""
        return self.expert * self.expert_tensor

    @property
    def sequence_multiple(self) -> int:
        """The tokens of a micro-batch are a multiple of this, the number of equal slices."""
        return self.context * (self.tensor if self.sequence_parallel else 1)

    def head_exchange_size(self, num_attention_heads: int) -> int:
        """Number of context-parallel ranks that exchange heads; groups of them exchange keys and values."""
        if self.context_comm == "ring":
            return 1
        return math.gcd(self.context, num_attention_heads // self.tensor)

    def check(self, model: DiTConfig, world_size: int | None = None) -> int:
        """Check the layout and return the data-parallel size; needs no process group.

        Without `world_size`, the smallest possible one is used.

        Raises:
            UserError: for an impossible layout, with the broken rule and the nearest layout that works.
        """
        division = Division(self, model, self.smallest_world if world_size is None else world_size)
        broken = first_broken(RULES, division)
        if broken is not None:
            raise UserError(refusal(broken, division))
        return division.world_size // self.model_parallel_size

    def is_legal(self, model: DiTConfig, world_size: int) -> bool:
        return first_broken(RULES, Division(self, model, world_size)) is None

    def changes(self, other: "ParallelSizes") -> str:
        """The settings in which this layout differs from `other`, as overrides."""
        shown = [name for name in SETTINGS if getattr(self, name) != getattr(other, name)]
        return " ".join(f"{SETTINGS[name]}={self._setting(name)}" for name in shown)

    def _setting(self, name: str) -> str:
        value = getattr(self, name)
        if name == "fully_sharded":
            return "fsdp" if value else "distributed_optimizer"
        return str(value).lower()


_SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")


@dataclass(frozen=True, slots=True)
class Division:
    """A network, and the ranks to split it over."""

    sizes: ParallelSizes
    model: DiTConfig
    world_size: int

    @property
    def heads_of_rank(self) -> int:
        """Heads of a tensor-parallel rank."""
        return self.model.num_attention_heads // self.sizes.tensor

    @property
    def ranks_of_stage(self) -> int:
        return self.world_size // self.sizes.pipeline


def refusal(broken: Rule[Division], division: Division) -> str:
    """The message of a broken rule, with the nearest layout that works."""
    ranks = max(division.world_size, 1)
    near = min(legal_layouts(division.model, ranks, division.sizes), key=lambda one: _distance(division.sizes, one))
    return f"{broken.message(division)}; the nearest layout that works on {ranks} ranks: {near.changes(division.sizes)}"


def _as_flags(sizes: ParallelSizes, *names: str) -> str:
    """Settings and values, as "parallel.tensor_model_parallel_size=2 x parallel.context_parallel_size=2"."""
    return " x ".join(f"{SETTINGS[name]}={getattr(sizes, name)}" for name in names)


def _model_parallel(sizes: ParallelSizes) -> str:
    """The sizes that split one replica of the model."""
    return _as_flags(sizes, *(name for name in ("tensor", "pipeline", "context") if getattr(sizes, name) > 1))


def _divides(name: str, what: Callable[[Division], tuple[str, int]], holds: str) -> Rule[Division]:
    """The rule that a size divides `what` = (description, number), so that each rank holds the same amount."""
    return Rule(
        needs=lambda division: what(division)[1] % getattr(division.sizes, name) == 0,
        remedy=lambda division: (
            f"{_as_flags(division.sizes, name)} does not divide {what(division)[0]}: a rank holds {holds}"
        ),
    )


def _in_chunks(layers: Callable[[Division], tuple[str, int]]) -> Rule[Division]:
    """The rule that the model chunks have equally many of `layers` = (description, number)."""
    return Rule(
        needs=lambda division: layers(division)[1] % division.sizes.num_chunks == 0,
        remedy=lambda division: (
            f"{division.sizes.num_chunks} model chunks ({_as_flags(division.sizes, 'pipeline', 'virtual_pipeline')}) "
            f"do not divide {layers(division)[0]}: each holds equally many layers"
        ),
    )


def _of_model(key: str, value: Callable[[DiTConfig], int]) -> Callable[[Division], tuple[str, int]]:
    return lambda division: (f"model.{key}={value(division.model)}", value(division.model))


_OF_RANKS: tuple[Rule[Division], ...] = (
    Rule(
        needs=lambda division: division.world_size % division.sizes.model_parallel_size == 0,
        remedy=lambda division: (
            f"{division.world_size} ranks cannot hold whole replicas of a model split over "
            f"{division.sizes.model_parallel_size} ({_model_parallel(division.sizes)}): start "
            f"{nearest_multiples(division.world_size, division.sizes.model_parallel_size)} ranks"
        ),
    ),
    _divides("tensor", _of_model("num_attention_heads", lambda model: model.num_attention_heads), "whole heads"),
    _divides("tensor", _of_model("num_query_groups", lambda model: model.key_heads), "whole query groups"),
    _divides("tensor", _of_model("ffn_hidden_size", lambda model: model.mlp_size), "an equal shard of the MLP"),
    Rule(
        when=lambda division: division.sizes.sequence_parallel,
        needs=lambda division: division.sizes.tensor > 1,
        remedy=f"{SETTINGS['sequence_parallel']}=true needs {SETTINGS['tensor']} of 2 or more: "
        "with 1 there is nothing to split",
    ),
    Rule(
        when=lambda division: division.sizes.context_comm == "ulysses",
        needs=lambda division: division.heads_of_rank % division.sizes.context == 0,
        remedy=lambda division: (
            f"{_as_flags(division.sizes, 'context')} does not divide the {division.heads_of_rank} heads of a "
            f"tensor-parallel rank: a rank holds whole heads with {SETTINGS['context_comm']}=ulysses"
        ),
    ),
)
_OF_STAGES: tuple[Rule[Division], ...] = (
    _in_chunks(_of_model("num_layers", lambda model: model.num_layers)),
    _in_chunks(_of_model("text_tower.num_layers", lambda model: model.text_tower.num_layers)),
    Rule(
        when=lambda division: division.sizes.virtual_pipeline > 1,
        needs=lambda division: division.sizes.pipeline > 1,
        remedy=lambda division: (
            f"{_as_flags(division.sizes, 'virtual_pipeline')} needs {SETTINGS['pipeline']} of 2 or more: one stage has "
            "nothing to interleave"
        ),
    ),
    Rule(
        when=lambda division: division.sizes.pipeline > 1,
        needs=lambda division: not division.sizes.fully_sharded,
        remedy=lambda division: (
            f"{_as_flags(division.sizes, 'pipeline')} cannot be combined with {SETTINGS['fully_sharded']}=fsdp, which "
            "would gather the weights again for every micro-batch"
        ),
    ),
)
_OF_EXPERTS: tuple[Rule[Division], ...] = (
    Rule(
        when=lambda division: division.sizes.expert_ranks > 1,
        needs=lambda division: division.model.experts.num_experts > 0,
        remedy=lambda division: (
            f"{_as_flags(division.sizes, 'expert')} and {_as_flags(division.sizes, 'expert_tensor')} split experts, "
            "and the network has none (model.experts.num_experts=0)"
        ),
    ),
    _divides(
        "expert", _of_model("experts.num_experts", lambda model: model.experts.num_experts), "equally many experts"
    ),
    Rule(
        needs=lambda division: division.ranks_of_stage % division.sizes.expert_ranks == 0,
        remedy=lambda division: (
            f"the {division.ranks_of_stage} ranks of a stage cannot hold whole sets of experts over "
            f"{division.sizes.expert_ranks} ({_as_flags(division.sizes, 'expert', 'expert_tensor')})"
        ),
    ),
    _divides(
        "expert_tensor",
        _of_model("experts.ffn_hidden_size", lambda model: model.expert_size),
        "an equal shard of each expert",
    ),
    Rule(
        when=lambda division: division.model.experts.num_experts > 0 and division.sizes.tensor > 1,
        needs=lambda division: division.sizes.sequence_parallel,
        remedy=lambda division: (
            f"experts need {SETTINGS['sequence_parallel']}=true with {_as_flags(division.sizes, 'tensor')}: otherwise "
            "each of these ranks would send the same tokens"
        ),
    ),
)
RULES: tuple[Rule[Division], ...] = (*_OF_RANKS, *_OF_STAGES, *_OF_EXPERTS)
"""Rules of a legal parallel layout, for training and for sampling on several ranks."""


def legal_layouts(model: DiTConfig, world_size: int, like: ParallelSizes | None = None) -> Iterator[ParallelSizes]:
    """Every layout of `world_size` ranks that can train `model`; at least one.

    With `like`, only layouts whose switches (communication, sequence parallelism, sharding) are the same or off.
    """
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for tensor in divisors:
        for pipeline in divisors:
            for context in divisors:
                if world_size % (tensor * pipeline * context):
                    continue
                sizes = ParallelSizes(tensor=tensor, pipeline=pipeline, context=context)
                for divided in _divided_experts(sizes, model, world_size):
                    candidates = _switched(divided, model, like)
                    yield from (one for one in candidates if one.is_legal(model, world_size))


def _divided_experts(sizes: ParallelSizes, model: DiTConfig, world_size: int) -> Iterator[ParallelSizes]:
    """Layouts of these sizes with every split of the experts; their matrices are whole, or split like all others."""
    most = min(model.experts.num_experts, world_size // sizes.pipeline)
    for expert in range(1, max(most, 1) + 1):
        for expert_tensor in sorted({1, sizes.tensor}) if model.experts.num_experts else (1,):
            if model.experts.num_experts % expert == 0:
                yield replace(sizes, expert=expert, expert_tensor=expert_tensor)


def _switched(sizes: ParallelSizes, model: DiTConfig, like: ParallelSizes | None) -> Iterator[ParallelSizes]:
    """Layouts of these sizes with every combination of switches that makes a difference."""
    layers = model.num_layers // sizes.pipeline
    parts = [size for size in range(1, layers + 1) if layers % size == 0] if sizes.pipeline > 1 else [1]
    comms: tuple[ContextComm, ...] = ("ulysses", "ring", "both") if sizes.context > 1 else ("ulysses",)
    shards = (False, True)
    if like is not None:
        comms = tuple(dict.fromkeys((like.context_comm, "both" if sizes.context > 1 else like.context_comm)))
        shards = tuple({False, like.fully_sharded})
    for virtual in parts:
        for comm in comms:
            for is_cut in (False, True) if sizes.tensor > 1 else (False,):
                for shard in shards:
                    yield replace(
                        sizes,
                        virtual_pipeline=virtual,
                        context_comm=comm,
                        sequence_parallel=is_cut,
                        fully_sharded=shard,
                    )


def _distance(asked: ParallelSizes, other: ParallelSizes) -> float:
    """Distance of a layout from the requested one; factors between sizes count most."""
    sizes = sum(abs(math.log2(max(getattr(asked, name), 1) / getattr(other, name))) for name in _SIZES)
    switches = ("context_comm", "sequence_parallel", "fully_sharded")
    return sizes + 0.5 * sum(getattr(asked, name) != getattr(other, name) for name in switches)
