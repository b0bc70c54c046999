"""Weights, EMA weights and optimizer state in Megatron's distributed checkpoints.

Tensors that an optimizer shards over data-parallel ranks are gathered one by one and written whole (see
`models.megatron.checkpoint`), by each data-parallel rank in turn, which divides memory and work. To read, every rank
loads its tensor-parallel shards, some at a time, into host memory (the GPU may be full), and copies its slices.
"""

import queue
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.msc_utils import MultiStorageClientFeature
from torch import Tensor, nn

from megadit.models.host_to_device import HostCopies
from megadit.models.megatron.checkpoint import ema_key, model_key, optimizer_key
from megadit.models.megatron.groups import Groups
from megadit.models.megatron.shards import splits
from megadit.train.checkpoints.writer import BackgroundWrite
from megadit.train.optim.ema import EmaWeights
from megadit.train.optim.state import OwnedSlice, Ownership, assemble, assign, is_copy

MultiStorageClientFeature.disable()  # of folders, Energon's storage client only measures every read
READ_AT_ONCE = 2**31
"""Maximum bytes of whole tensors that a rank holds while it reads (at least one tensor with its optimizer state)."""
Keys = Mapping[str, Mapping[str, str]]
"""Parameter -> quantity ("weight", an EMA profile, ...) -> key in a checkpoint."""
FORM = CheckpointingConfig("torch_dist", 1)
_WRITER_PARAMETERS = signature(TorchDistSaveShardedStrategy.async_save).parameters
OWN_WRITER = {"async_strategy": "mcore"} if "async_strategy" in _WRITER_PARAMETERS else {}
"""Selects Megatron's own writer; from 0.17 on its default is nvidia-resiliency-ext, which writes in other processes."""


@dataclass(frozen=True, slots=True)
class TrainedTensors:
    """All tensors that training changes."""

    parameters: tuple[tuple[str, nn.Parameter], ...]
    """This rank's parameters with their canonical names; parameters that pipeline stages share are on each of them."""
    ownership: Ownership
    ema_weights: EmaWeights
    groups: Groups
    prefix: str = ""
    """Prefix of all keys in a checkpoint."""
    others: "tuple[tuple[TrainedTensors, int], ...]" = ()
    """Tensors of other trained networks (the critic), each with its optimizer steps per step of this one."""

    def start_save(self, directory: Path) -> BackgroundWrite:
        """Copy all tensors, and start to write them into an existing directory; every rank calls this."""
        shards = self._shards()
        for other, _ in self.others:
            shards |= other._shards()
        return BackgroundWrite(_request(shards, directory), directory, prefix=f"__{dist.get_rank()}_")

    def _shards(self) -> dict[str, ShardedTensor]:
        shards, device = {}, self.groups.device
        copies = HostCopies(device) if device.type == "cuda" else None
        for turn, (key, parameter, parts) in enumerate(self._owned_slices()):
            group = self.ownership.group_of(parameter)
            whole = assemble(parameter.shape, parts, group, destination=turn % group.size())
            if whole is not None:
                here = whole if copies is None else copies.copy(whole)
                shards[self.prefix + key] = self._sharded(key, parameter, here, replica=0)
        if copies is not None:
            copies.finish()
        return shards

    def save(self, directory: Path) -> None:
        """Write all tensors into an existing directory; every rank calls this."""
        self.start_save(directory).finish()

    @torch.no_grad()
    def load(self, directory: Path, *, step: int) -> None:
        """Read all tensors, saved after optimizer step `step`; every rank calls this."""
        slices, parameters = defaultdict(list), defaultdict(list)
        for owned in self.ownership.slices:
            slices[owned.name].append(owned)
        for name, parameter in self.parameters:
            parameters[name].append(parameter)  # several, if model chunks have copies
        sigma_rels = self.ema_weights.sigma_rels
        keys = {
            name: {"weight": model_key(name)} | {sigma_rel: ema_key(sigma_rel, name) for sigma_rel in sigma_rels}
            for name in parameters
        }
        for name, found in self._read(directory, keys):
            for parameter in parameters[name]:
                assign(parameter, found["weight"])  # also those whose masters other ranks own
                for sigma_rel in sigma_rels:
                    self.ema_weights.restore(sigma_rel, parameter, found[sigma_rel])
            for owned in slices.get(name, ()):
                owned.master.view(-1).copy_(owned.cut(found["weight"]))
        kept = {name: {state: optimizer_key(state, name) for state in of[0].state_names} for name, of in slices.items()}
        for name, found in self._read(directory, {name: states for name, states in kept.items() if states}):
            for owned in slices[name]:
                owned.restore_state({state: owned.cut(whole) for state, whole in found.items()}, step)
        for other, steps in self.others:
            other.load(directory, step=step * steps)

    def _owned_slices(self) -> Iterator[tuple[str, nn.Parameter, list[tuple[int, Tensor]]]]:
        """(key, parameter, this rank's slices of it) of every tensor, in the same order on all data-parallel ranks."""
        ranges: dict[nn.Parameter, list[tuple[OwnedSlice, int, int]]] = {}
        for owned, start, stop in self.ownership.ranges():
            ranges.setdefault(owned.parameter, []).append((owned, start, stop))
        for name, parameter in self.parameters:
            if is_copy(parameter):
                continue
            mine = ranges.get(parameter, [])
            yield model_key(name), parameter, [_slice_of(o, o.master.detach().reshape(-1), i, j) for o, i, j in mine]
            for sigma_rel in self.ema_weights.sigma_rels:
                yield ema_key(sigma_rel, name), parameter, self.ema_weights.parts(sigma_rel, parameter)
            for state in self.ownership.state_names[name]:
                yield optimizer_key(state, name), parameter, [_slice_of(o, o.state(state), i, j) for o, i, j in mine]

    def _read(self, directory: Path, keys: Keys) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(parameter, {quantity: whole tensor}) of all of this rank's parameters, float32 on the CPU."""
        parts = _some_at_a_time(keys, dict(self.parameters))
        counts = [0] * dist.get_world_size()
        dist.all_gather_object(counts, len(parts))  # reading is collective
        for names in [*parts, *[[]] * (max(counts) - len(parts))]:
            found = self._read_keys(directory, {key: name for name in names for key in keys[name].values()})
            for name in names:
                yield name, {what: found.pop(key) for what, key in keys[name].items()}

    def _read_keys(self, directory: Path, names: dict[str, str]) -> dict[str, Tensor]:
        parameters, shards = dict(self.parameters), {}
        for key, parameter in ((key, parameters[name]) for key, name in names.items()):
            empty = torch.empty(parameter.shape, dtype=torch.float32)
            replica = self.ownership.group_of(parameter).rank()
            shards[key] = self._sharded(key, parameter, empty, replica=replica)
        # ranks may read different tensors, which Megatron's check of access integrity would refuse
        return dist_checkpointing.load(shards, str(directory), validate_access_integrity=False)

    def _sharded(self, key: str, parameter: nn.Parameter, tensor: Tensor, *, replica: int) -> ShardedTensor:
        axes = self.groups.axes
        offsets = [(dim, axes[axis].rank(), axes[axis].size()) for dim, axis in splits(parameter)]
        copy = 0 if offsets else self.groups.tensor.rank()
        return ShardedTensor.from_rank_offsets(self.prefix + key, tensor, *offsets, replica_id=(0, copy, replica))


def _request(shards: dict[str, ShardedTensor], directory: Path) -> AsyncRequest:
    """Megatron's request to write tensors alone, in a form that all its versions read.

    `dist_checkpointing.save` of newer versions also writes pickled objects, and leaves out a file that 0.16.1 needs.
    """
    shards, _ = save_preprocess(shards)  # checks that exactly one rank writes each shard
    # Megatron's writer reports through the queue of a manager process that it spawns; no other process is needed
    filesystem_async._results_queue = queue.SimpleQueue()
    strategy = TorchDistSaveShardedStrategy(FORM.sharded_backend, FORM.sharded_backend_version, thread_count=1)
    request = strategy.async_save(shards, directory, **OWN_WRITER)
    request.finalize_fns.append(lambda: _describe(directory))
    return request


def _describe(directory: Path) -> None:
    """Write the metadata for Megatron's readers, once all ranks have written; every rank calls this."""
    if dist.get_rank() == 0:
        torch.save({}, directory / COMMON_STATE_FNAME)
        save_config(FORM, str(directory))
    dist.barrier()


def _some_at_a_time(keys: Keys, parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Divide the parameters into lists of at most `READ_AT_ONCE` bytes, or one parameter."""
    parts, size = [[]], 0
    for name in keys:
        more = 4 * len(keys[name]) * parameters[name].numel()
        if parts[-1] and size + more > READ_AT_ONCE:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += more
    return parts


def _slice_of(owned: OwnedSlice, values: Tensor, start: int, stop: int) -> tuple[int, Tensor]:
    """Elements start..stop of a parameter, from the flat values of an owned slice."""
    return start, values[start - owned.start : stop - owned.start]
