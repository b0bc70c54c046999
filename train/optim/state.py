"""Slices of parameters and optimizer state that each rank owns, in one form for all of Megatron's optimizers.

An optimizer has float32 master copies and state (moments, momentum) of all parameters on every data-parallel rank, of
whole parameters divided among ranks, or of slices of parameters. Here all of these are slices of flattened parameters,
so that EMA weights and layout-independent checkpoints need one implementation.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megadit.models.megatron.groups import Groups
from megadit.models.megatron.shards import is_expert
from megadit.train.optim.adamw import HalfMomentAdamW
from megadit.train.optim.muon import Muon

DataParallel = _BaseDataParallel
"""A model chunk in one of Megatron's data-parallel wrappers."""


def named_parameters(parts: Sequence[DataParallel]) -> Iterator[tuple[str, nn.Parameter]]:
    """All trained parameters of this rank's model chunks with their canonical names.

    Parameters that several chunks have (timestep and text embedding) come once per chunk.
    """
    for part in parts:
        yield from ((name, value) for name, value in part.module.named_parameters() if value.requires_grad)


def is_copy(parameter: nn.Parameter) -> bool:
    """Whether an earlier model chunk has the same parameter."""
    return getattr(parameter, "shared", False)


def held(parameter: Tensor) -> tuple[int, Tensor]:
    """Return this rank's shard of a parameter: index of its first element, and the shard (of any shape)."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.detach()
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0] * math.prod(parameter.shape[1:]), parameter.detach().to_local()  # FSDP shards the first dimension


@torch.no_grad()
def assign(parameter: nn.Parameter, whole: Tensor) -> None:
    """Set this rank's shard of a parameter from the whole tensor, of its shape."""
    start, values = held(parameter)
    values.copy_(whole.reshape(-1)[start : start + values.numel()].view_as(values))


@dataclass(frozen=True, slots=True)
class OwnedSlice:
    """Elements start..stop of a flattened parameter, with their optimizer state."""

    name: str
    """The parameter's name in the training model."""
    parameter: nn.Parameter
    start: int
    stop: int
    master: Tensor
    """Master copy (float32, any shape) that the optimizer updates; its elements are start..stop of the parameter."""
    key: Tensor
    """Key of the optimizer's state: `master`, or the DTensor whose local shard that is."""
    optimizer: torch.optim.Optimizer

    def cut(self, tensor: Tensor) -> Tensor:
        """These elements of a tensor of the parameter's shape, flat."""
        return tensor.reshape(-1)[self.start : self.stop]

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the optimizer's per-element state, without the master copy."""
        return ("momentum_buffer",) if isinstance(self.optimizer, Muon) else ("exp_avg", "exp_avg_sq")

    def state(self, name: str) -> Tensor:
        """One of `state_names`, flat; zeros before the first step."""
        state = self.optimizer.state.get(self.key, {})
        return held(state[name])[1].reshape(-1) if name in state else torch.zeros_like(self.master).reshape(-1)

    def restore_state(self, values: dict[str, Tensor], step: int) -> None:
        """Set the state after `step` updates from flat tensors."""
        dtype = torch.bfloat16 if isinstance(self.optimizer, HalfMomentAdamW) else torch.float32
        state = {
            name: self._like_key(value.to(self.master.device, dtype, copy=True).view_as(self.master))
            for name, value in values.items()
        }
        if isinstance(self.optimizer, torch.optim.AdamW):
            # one tensor for each, because torch adds to it in place; a fused kernel needs it on the parameter's device
            [of_group] = [group for group in self.optimizer.param_groups if any(p is self.key for p in group["params"])]
            device = self.master.device if of_group["fused"] else None
            state["step"] = torch.tensor(float(step), device=device)
        elif not isinstance(self.optimizer, Muon):  # HalfMomentAdamW and TransformerEngine's count once per group
            for group in self.optimizer.param_groups:
                group["step"] = step
        self.optimizer.state[self.key] = state

    def _like_key(self, local: Tensor) -> Tensor:
        if not isinstance(self.key, DTensor):
            return local
        mesh, placements = self.key.device_mesh, self.key.placements
        return DTensor.from_local(local, mesh, placements, shape=self.key.shape, stride=self.key.stride())


@dataclass(frozen=True, slots=True)
class Ownership:
    """All slices of one rank; those of all ranks of a group cover the parameters."""

    slices: tuple[OwnedSlice, ...]
    is_replicated: bool
    """Whether every data-parallel rank owns everything; else slices are disjoint."""
    state_names: dict[str, tuple[str, ...]]
    """State names of each parameter of the model, whichever rank owns it."""
    groups: Groups

    def group_of(self, parameter: nn.Parameter) -> ProcessGroup:
        """Ranks that hold the same shard of a parameter, and together own all of it."""
        return self.groups.expert_data if is_expert(parameter) else self.groups.data

    def ranges(self) -> Iterator[tuple[OwnedSlice, int, int]]:
        """(slice, start, stop) such that all data-parallel ranks together yield every element exactly once."""
        for owned in self.slices:
            group = self.group_of(owned.parameter)
            start, stop = owned.start, owned.stop
            if self.is_replicated:
                count = stop - start
                start, stop = (start + count * rank // group.size() for rank in (group.rank(), group.rank() + 1))
            if stop > start:
                yield owned, start, stop


def find_ownership(
    optimizer: MegatronOptimizer, named: Iterable[tuple[str, nn.Parameter]], groups: Groups
) -> Ownership:
    """Find the slices of the `named` parameters that `optimizer` owns on this rank."""
    names = {parameter: name for name, parameter in named}
    parts = optimizer.chained_optimizers
    slices = [
        OwnedSlice(names[parameter], parameter, start, start + held(key)[1].numel(), held(key)[1], key, part.optimizer)
        for part in parts
        for parameter, start, key in _owned(part)
    ]
    is_sharded = (
        isinstance(optimizer, LayerWiseDistributedOptimizer)
        or any(isinstance(part, DistributedOptimizer) for part in parts)
        or any(isinstance(parameter, DTensor) for parameter in names)
    )
    return Ownership(
        slices=tuple(slices), is_replicated=not is_sharded, state_names=_gather_state_names(slices), groups=groups
    )


def _gather_state_names(slices: list[OwnedSlice]) -> dict[str, tuple[str, ...]]:
    mine = {owned.name: owned.state_names for owned in slices}
    everyones: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return {name: states for part in everyones for name, states in part.items()}


def _owned(optimizer: MegatronOptimizer) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
    """(parameter, first element, master copy) of everything that one of Megatron's optimizers owns."""
    if isinstance(optimizer, DistributedOptimizer):
        for parameter, (group, position) in optimizer.model_param_group_index_map.items():
            start = optimizer._get_model_param_range_map(parameter)["param"].start
            yield parameter, start, optimizer.optimizer.param_groups[group]["params"][position]
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for parameters, masters in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            yield from ((parameter, 0, master) for parameter, master in zip(parameters, masters, strict=True))
        yield from ((parameter, 0, parameter) for group in optimizer.fp32_from_fp32_groups for parameter in group)
    else:
        yield from ((p, held(p)[0], p) for group in optimizer.param_groups for p in group["params"])


@torch.no_grad()
def assemble(
    shape: torch.Size, parts: list[tuple[int, Tensor]], group: ProcessGroup, *, destination: int | None = None
) -> Tensor | None:
    """Gather a whole tensor from the flat float32 slices (first element, values) of the ranks of `group`.

    Args:
        shape: of the whole tensor.
        parts: slices of this rank; those of all ranks cover the tensor without overlap.
        group: ranks that all call this for the same tensor.
        destination: the only rank of `group` that gets the result; None: all of them.
    """
    whole = torch.zeros(shape, dtype=torch.float32, device=parts[0][1].device if parts else _device())
    for start, values in parts:
        whole.view(-1)[start : start + values.numel()] = values
    if group.size() > 1 and destination is None:
        dist.all_reduce(whole, group=group)
    elif group.size() > 1:
        dist.reduce(whole, dist.get_global_rank(group, destination), group=group)
    return whole if destination in (None, group.rank()) else None


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
