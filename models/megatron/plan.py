"""The parallel plan: one table that says how ranks share each parameter of a network.

The first row that matches a parameter's name gives its role, which determines the linear that replaces a plain one
(`parallelize.py`), the shape of a rank's shard (`local_shape`), and marks for Megatron and checkpoints (`mark`).

| role             | a rank holds               | its gradient there                                                   |
|------------------|----------------------------|----------------------------------------------------------------------|
| `COLUMN`         | some outputs (whole heads) | complete; sequence parallelism gathers the tokens of the input       |
| `COLUMN_OF_TEXT` | some outputs               | complete; every rank has the whole text, so nothing is gathered      |
| `ROW`            | some inputs                | complete; outputs are summed over ranks                              |
| `SUM_OVER_HEADS` | the whole                  | partial, from the rank's heads: summed over tensor-parallel ranks    |
| `PARTIAL`        | the whole                  | partial under sequence parallelism, from the rank's tokens: summed   |
| `WHOLE`          | the whole                  | complete: it reads all tokens, or the whole text                     |
| `EXPERTS_*`      | some experts, some of each | complete after a sum over the ranks that hold the same               |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megadit.models.networks.registry import in_tower

Axes = Mapping[str, ProcessGroup]
"""`tensor`, `expert` or `expert_tensor` -> the ranks among which a parameter may be split."""


@dataclass(frozen=True, slots=True)
class Role:
    """How ranks share a parameter."""

    name: str
    split: tuple[tuple[int, str], ...] = ()
    """(dimension, axis) of each split over ranks (`Axes`); (): each rank holds the whole."""

    @property
    def is_expert(self) -> bool:
        return any(axis == "expert" for _, axis in self.split)

    @property
    def is_linear(self) -> bool:
        """Whether it belongs to a linear that tensor-parallel ranks share."""
        return any(axis == "tensor" for _, axis in self.split)


COLUMN = Role("column", ((0, "tensor"),))
COLUMN_OF_TEXT = Role("column of text", ((0, "tensor"),))
ROW = Role("row", ((1, "tensor"),))
SUM_OVER_HEADS = Role("sum over heads")
PARTIAL = Role("partial")
WHOLE = Role("whole")
EXPERTS_UP = Role("experts, up", ((0, "expert"), (1, "expert_tensor")))
EXPERTS_DOWN = Role("experts, down", ((0, "expert"), (2, "expert_tensor")))


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the plan."""

    names: str
    """Patterns of parameters' names, separated by |; * matches anything."""
    role: Role

    def has(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names.split("|"))


PLAN = (
    Row("blocks.*.experts.fc1", EXPERTS_UP),
    Row("blocks.*.experts.fc2", EXPERTS_DOWN),
    # `down` of adapters (`lora/layers.py`); their other tensors are split like the outputs of their linear
    Row("blocks.*_attention.qkv.*.down|blocks.*.cross_attention.q.*.down|blocks.*.fc1.*.down", PARTIAL),
    Row("blocks.*.cross_attention.*kv.*.down", WHOLE),
    Row("blocks.*_attention.qkv.[wba]*|blocks.*.cross_attention.q.[wba]*|blocks.*.fc1.[wba]*|*[._][qk]_norm.*", COLUMN),
    Row("blocks.*.cross_attention.*kv.[wba]*", COLUMN_OF_TEXT),
    Row("blocks.*_attention.proj.weight_steps|blocks.*.fc2.weight_steps", WHOLE),  # per row, see `linears/int8.py`
    Row("blocks.*_attention.proj.weight*|blocks.*_attention.proj.*.down|blocks.*.fc2.weight*|blocks.*.fc2.*.down", ROW),
    Row("blocks.*_attention.proj.[ba]*|blocks.*.fc2.[ba]*", PARTIAL),  # added to a rank's tokens after the sum
    Row("blocks.*.[qk]_layernorm.weight", SUM_OVER_HEADS),
    Row("blocks.*.modulation.*|blocks.*_layernorm.*|blocks.*.router.weight|shared_modulation.*", PARTIAL),
    Row("x_embedder.*|text_embedder.*|image_embedder.*|null_text|positions.*|head.*|log_scale|score_offset", WHOLE),
    Row("*_embedder.*|condition_layernorm.weight|final_layer.*", PARTIAL),
)
"""The plan; the first row that matches a parameter's name decides."""

_OF_ONE_CHUNK = ("x_embedder.", "blocks.", "final_layer.", "head.", "log_scale", "score_offset")
"""Prefixes of parameters that one model chunk has; every chunk has a copy of the others."""


def role_of(name: str, plan: Sequence[Row] = PLAN) -> Role:
    """The role of the parameter `name`; in one of two towers, its role in a network with one.

    Raises:
        LookupError: if no row of the plan matches.
    """
    for row in plan:
        if row.has(in_tower(name)):
            return row.role
    raise LookupError(f"the parallel plan has no row for the parameter {name!r}: add one (models/megatron/plan.py)")


def mark(network: nn.Module, plan: Sequence[Row], *, sequence_parallel: bool) -> None:
    """Sets on each parameter the marks by which Megatron and our checkpoints know how ranks share it."""
    for name, parameter in network.named_parameters():
        role = role_of(name, plan)
        is_summed = "q_layernorm" in name or "k_layernorm" in name
        assert is_summed == (role is SUM_OVER_HEADS), f"Megatron sums over heads by name, and {name} is {role.name}"
        parameter.splits = role.split
        # an expert's second one: no rank of the group over which norms are summed has the same shard
        dims = [dim for dim, axis in role.split if axis != "expert"]
        parameter.tensor_model_parallel = bool(dims)
        parameter.partition_dim, parameter.partition_stride = dims[0] if dims else -1, 1
        parameter.sequence_parallel = sequence_parallel and role is PARTIAL
        parameter.allreduce = not role.is_expert
        # gradients of copies are summed over the chunks (`pipeline_parallel`), and count once in the norm (`shared`);
        # each copy has its own bucket (`shared_embedding`), which the distributed optimizer of every chunk splits alike
        is_copy = network.part.count > 1 and not in_tower(name).startswith(_OF_ONE_CHUNK)
        parameter.pipeline_parallel = parameter.shared_embedding = is_copy
        parameter.shared = is_copy and not network.part.is_first


def local_shape(full: torch.Size, role: Role, axes: Axes) -> torch.Size:
    """The shape of a rank's shard of a parameter."""
    shape = list(full)
    for dim, axis in role.split:
        shape[dim] //= axes[axis].size()
    return torch.Size(shape)
