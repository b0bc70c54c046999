"""How ranks share the work, and the rules of it, known before any process group (and without torch).

    world = tensor x context x data x pipeline

Tensor-parallel ranks split the matrices of a layer, context-parallel ranks the tokens of every sample, pipeline stages
the layers; each keeps one copy of the model, and data-parallel copies read different samples.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megadit.models.config import DiTConfig
from megadit.models.support import UserError

ContextComm = Literal["ulysses", "ring", "both"]

SETTINGS = {
    "tensor": "parallel.tensor_model_parallel_size",
    "pipeline": "parallel.pipeline_model_parallel_size",
    "virtual_pipeline": "parallel.virtual_pipeline_model_parallel_size",
    "context": "parallel.context_parallel_size",
    "context_comm": "parallel.context_parallel_comm",
    "sequence_parallel": "parallel.sequence_parallel",
    "fully_sharded": "parallel.data_parallel",
}
"""The setting of a run that decides each field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSizes:
    """How many ranks share each dimension of the work; what remains of the world is data parallel."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    """Parts of the network on each pipeline stage, taken in turn: more of them, smaller bubbles."""
    context: int = 1
    context_comm: ContextComm = "ulysses"
    """What context-parallel ranks exchange for attention: heads (`ulysses`), keys and values (`ring`), or heads as far
    as there are enough of them and keys and values beyond (`both`)."""
    sequence_parallel: bool = False
    fully_sharded: bool = False
    """Parameters, gradients and optimizer state are divided among the data- and context-parallel ranks (FSDP)."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together compute one copy of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def num_parts(self) -> int:
        """Parts into which the layers are divided."""
        return self.pipeline * self.virtual_pipeline

    @property
    def sequence_multiple(self) -> int:
        """The tokens of a micro-batch are a multiple of this: they are cut into so many equal slices."""
        return self.context * (self.tensor if self.sequence_parallel else 1)

    def head_exchange_size(self, num_attention_heads: int) -> int:
        """How many of the context-parallel ranks exchange heads; groups of them exchange keys and values."""
        if self.context_comm == "ring":
            return 1
        return math.gcd(self.context, num_attention_heads // self.tensor)

    def check(self, model: DiTConfig, world_size: int | None = None) -> int:
        """The data-parallel size; called before any process group exists.

        Without `world_size` the ranks of one copy of the model are taken.

        Raises:
            UserError: for a layout that cannot be built: the rule that it breaks, and the nearest one that works.
        """
        world_size = self.model_parallel_size if world_size is None else world_size
        broken = self.broken_rule(model, world_size)
        if broken is None:
            return world_size // self.model_parallel_size
        near = min(legal_layouts(model, max(world_size, 1), self), key=lambda other: _distance(self, other))
        raise UserError(f"{broken}; the nearest layout that works on {max(world_size, 1)} ranks: {near.changes(self)}")

    def broken_rule(self, model: DiTConfig, world_size: int) -> str | None:
        """The first rule that this layout breaks, None if it is legal."""
        for name in _SIZES:
            if getattr(self, name) < 1:
                return f"{SETTINGS[name]}={getattr(self, name)} must be 1 or more"
        rules = (*self._rules_of_ranks(model, world_size), *self._rules_of_stages(model))
        return next((words for holds, words in rules if not holds), None)

    def _rules_of_ranks(self, model: DiTConfig, world_size: int) -> tuple[tuple[bool, str], ...]:
        """(whether it holds, what is said if not) of each rule on copies, heads and tokens."""
        heads_of_rank = model.num_attention_heads // self.tensor
        return (
            (
                world_size % self.model_parallel_size == 0,
                f"{world_size} ranks cannot hold whole copies of a model spread over {self.model_parallel_size} "
                f"({self._product()}): start {_multiples_around(world_size, self.model_parallel_size)} ranks",
            ),
            (
                model.num_attention_heads % self.tensor == 0,
                self._does_not_divide(
                    "tensor", f"model.num_attention_heads={model.num_attention_heads}", "whole heads"
                ),
            ),
            (
                model.key_heads % self.tensor == 0,
                self._does_not_divide("tensor", f"model.num_query_groups={model.key_heads}", "whole groups of heads"),
            ),
            (
                model.mlp_size % self.tensor == 0,
                self._does_not_divide("tensor", f"model.ffn_hidden_size={model.mlp_size}", "an equal part of the MLP"),
            ),
            (
                self.tensor > 1 or not self.sequence_parallel,
                f"{SETTINGS['sequence_parallel']}=true needs {SETTINGS['tensor']} of 2 or more: "
                "with 1 there is nothing to cut",
            ),
            (
                self.context_comm != "ulysses" or heads_of_rank % self.context == 0,
                self._does_not_divide(
                    "context",
                    f"the {heads_of_rank} heads of a tensor-parallel rank",
                    f"whole heads with {SETTINGS['context_comm']}=ulysses",
                ),
            ),
        )

    def _rules_of_stages(self, model: DiTConfig) -> tuple[tuple[bool, str], ...]:
        pipeline = f"{SETTINGS['pipeline']}={self.pipeline}"
        virtual = f"{SETTINGS['virtual_pipeline']}={self.virtual_pipeline}"
        return (
            (
                model.num_layers % self.num_parts == 0,
                f"{self.num_parts} parts ({pipeline} x {virtual}) do not divide model.num_layers={model.num_layers}: "
                "each holds equally many layers",
            ),
            (
                self.pipeline > 1 or self.virtual_pipeline == 1,
                f"{virtual} needs {SETTINGS['pipeline']} of 2 or more: one stage has nothing to take in turn",
            ),
            (
                self.pipeline == 1 or not self.fully_sharded,
                f"{pipeline} cannot be combined with {SETTINGS['fully_sharded']}=fsdp, which would gather the weights "
                "again for every micro-batch",
            ),
        )

    def changes(self, other: "ParallelSizes") -> str:
        """The settings in which this layout differs from `other`, as overrides."""
        shown = [name for name in SETTINGS if getattr(self, name) != getattr(other, name)]
        return " ".join(f"{SETTINGS[name]}={self._setting(name)}" for name in shown)

    def _setting(self, name: str) -> str:
        value = getattr(self, name)
        if name == "fully_sharded":
            return "fsdp" if value else "distributed_optimizer"
        return str(value).lower()

    def _does_not_divide(self, name: str, what: str, holds: str) -> str:
        return f"{SETTINGS[name]}={getattr(self, name)} does not divide {what}: a rank holds {holds}"

    def _product(self) -> str:
        parts = [name for name in ("tensor", "pipeline", "context") if getattr(self, name) > 1]
        return " x ".join(f"{SETTINGS[name]}={getattr(self, name)}" for name in parts)


_SIZES = ("tensor", "pipeline", "virtual_pipeline", "context")


def legal_layouts(model: DiTConfig, world_size: int, like: ParallelSizes | None = None) -> Iterator[ParallelSizes]:
    """Every layout of `world_size` ranks that can train `model`; at least one.

    With `like`, only those whose switches (communication, sequence parallelism, sharding) are its own or off.
    """
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for tensor in divisors:
        for pipeline in divisors:
            for context in divisors:
                if world_size % (tensor * pipeline * context) == 0:
                    sizes = ParallelSizes(tensor=tensor, pipeline=pipeline, context=context)
                    candidates = _switched(sizes, model, like)
                    yield from (one for one in candidates if one.broken_rule(model, world_size) is None)


def _switched(sizes: ParallelSizes, model: DiTConfig, like: ParallelSizes | None) -> Iterator[ParallelSizes]:
    """Layouts of these sizes with every setting of the switches that makes a difference."""
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
    """How much a layout differs from the one asked for: factors between sizes count most."""
    sizes = sum(abs(math.log2(max(getattr(asked, name), 1) / getattr(other, name))) for name in _SIZES)
    switches = ("context_comm", "sequence_parallel", "fully_sharded")
    return sizes + 0.5 * sum(getattr(asked, name) != getattr(other, name) for name in switches)


def _multiples_around(value: int, factor: int) -> str:
    below, above = value // factor * factor, -(-value // factor) * factor
    return f"{below} or {above}" if below else f"{above}"
