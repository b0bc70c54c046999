"""Weights, averages and optimizer state, to and from the distributed checkpoints of Megatron.

Whatever an optimizer shards, tensors are put together one by one and written whole (see
`models.megatron.checkpoint`), each by one data-parallel rank: the rank next in turn, so that memory and writing are
spread. Every rank reads the tensors of its tensor-parallel share, some at a time into the host's memory, and keeps its
slices: a GPU that a run fills has no room for more.
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
from torch import Tensor, nn

from megadit.models.megatron.checkpoint import ema_key, model_key, optimizer_key
from megadit.models.megatron.groups import Groups
from megadit.models.megatron.shards import splits
from megadit.train.checkpoints.writer import BackgroundWrite
from megadit.train.optim.ema import EmaWeights
from megadit.train.optim.state import OwnedSlice, Ownership, assemble, assign, is_copy

READ_AT_ONCE = 2**31
"""Bytes of whole tensors that a rank holds while it reads (or one tensor, and its optimizer state)."""
Keys = Mapping[str, Mapping[str, str]]
"""Parameter -> what of it -> the key in a checkpoint."""
FORM = CheckpointingConfig("torch_dist", 1)
_WRITER_PARAMETERS = signature(TorchDistSaveShardedStrategy.async_save).parameters
OWN_WRITER = {"async_strategy": "mcore"} if "async_strategy" in _WRITER_PARAMETERS else {}
"""Megatron's own writer: from 0.17 on its default, nvidia-resiliency-ext, writes in other processes."""


@dataclass(frozen=True, slots=True)
class TrainedTensors:
    """Every tensor that training changes."""

    parameters: tuple[tuple[str, nn.Parameter], ...]
    """This rank's parameters under their canonical names; those that pipeline stages share are on each of these stages.
    """
    ownership: Ownership
    ema_weights: EmaWeights
    groups: Groups
    prefix: str = ""
    """Prefix of all keys in a checkpoint."""
    others: "tuple[tuple[TrainedTensors, int], ...]" = ()
    """Tensors of networks trained beside this one, each with its optimizer steps per step of this one."""

    def start_save(self, directory: Path) -> BackgroundWrite:
        """Copies all tensors, and begins to write them into an existing directory; every rank calls this."""
        shards = self._shards()
        for other, _ in self.others:
            shards |= other._shards()
        return BackgroundWrite(_request(shards, directory), directory, prefix=f"__{dist.get_rank()}_")

    def _shards(self) -> dict[str, ShardedTensor]:
        shards = {}
        for turn, (key, parameter, parts) in enumerate(self._owned_slices()):
            group = self.ownership.group_of(parameter)
            whole = assemble(parameter.shape, parts, group, destination=turn % group.size())
            if whole is not None:
                shards[self.prefix + key] = self._sharded(key, parameter, whole.cpu(), replica=0)
        return shards

    def save(self, directory: Path) -> None:
        """Writes all tensors into an existing directory; every rank calls this."""
        self.start_save(directory).finish()

    @torch.no_grad()
    def load(self, directory: Path, *, step: int) -> None:
        """Reads all tensors as they were after optimizer step `step`; every rank calls this."""
        slices, parameters = defaultdict(list), defaultdict(list)
        for owned in self.ownership.slices:
            slices[owned.name].append(owned)
        for name, parameter in self.parameters:
            parameters[name].append(parameter)  # several, where parts of the network have copies
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
        """(key, parameter, this rank's parts of it) of every tensor, in the same order on every data-parallel rank."""
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
        """(parameter, {what: whole tensor}), float32 on the CPU; every rank goes through all of its own."""
        parts = _some_at_a_time(keys, dict(self.parameters))
        counts = [0] * dist.get_world_size()
        dist.all_gather_object(counts, len(parts))  # reading is a matter of all ranks
        for names in [*parts, *[[]] * (max(counts) - len(parts))]:
            found = self._read_keys(directory, {key: name for name in names for key in keys[name].values()})
            for name in names:
                yield name, {what: found.pop(key) for what, key in keys[name].items()}

    def _read_keys(self, directory: Path, names: dict[str, str]) -> dict[str, Tensor]:
        parameters = dict(self.parameters)
        shards = {
            key: self._sharded(
                key,
                parameters[name],
                torch.empty(parameters[name].shape, dtype=torch.float32),
                replica=self.ownership.group_of(parameters[name]).rank(),
            )
            for key, name in names.items()
        }
        # ranks may want different tensors, which Megatron's check of the access would take for a mistake
        return dist_checkpointing.load(shards, str(directory), validate_access_integrity=False)

    def _sharded(self, key: str, parameter: nn.Parameter, tensor: Tensor, *, replica: int) -> ShardedTensor:
        axes = self.groups.axes
        offsets = [(dim, axes[axis].rank(), axes[axis].size()) for dim, axis in splits(parameter)]
        copy = 0 if offsets else self.groups.tensor.rank()
        return ShardedTensor.from_rank_offsets(self.prefix + key, tensor, *offsets, replica_id=(0, copy, replica))


def _request(shards: dict[str, ShardedTensor], directory: Path) -> AsyncRequest:
    """Megatron's request to write tensors, and nothing else, as every version reads them.

    `dist_checkpointing.save` of newer versions also writes what is no tensor among them, as an object to be unpickled,
    and leaves out the file that 0.16.1 looks for.
    """
    shards, _ = save_preprocess(shards)  # compares ranks: each part of a tensor must be written by one
    # Megatron's writer reports through a queue of a manager process that it spawns; no other process is involved
    filesystem_async._results_queue = queue.SimpleQueue()
    strategy = TorchDistSaveShardedStrategy(FORM.sharded_backend, FORM.sharded_backend_version, thread_count=1)
    request = strategy.async_save(shards, directory, **OWN_WRITER)
    request.finalize_fns.append(lambda: _describe(directory))
    return request


def _describe(directory: Path) -> None:
    """Tells Megatron's readers the form of what lies there, once all ranks have written; every rank calls this."""
    if dist.get_rank() == 0:
        torch.save({}, directory / COMMON_STATE_FNAME)
        save_config(FORM, str(directory))
    dist.barrier()


def _some_at_a_time(keys: Keys, parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """The parameters in parts, of which each has at most `READ_AT_ONCE` bytes, or one parameter."""
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
