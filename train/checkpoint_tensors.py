"""Weights, averages and optimizer state, to and from the distributed checkpoints of Megatron.

Whatever an optimizer shards, tensors are put together one by one and written whole (see
`models.megatron.checkpoint`), each by one data-parallel rank: the rank next in turn, so that memory and writing are
spread. Reading needs no such care: every rank reads the tensors of its tensor-parallel share and keeps its slices.
"""

import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor, nn

from megadit.models.megatron.checkpoint import ema_key, model_key, optimizer_key
from megadit.models.megatron.groups import Groups
from megadit.models.megatron.shards import splits
from megadit.train.background_write import BackgroundWrite
from megadit.train.ema import WeightAverages
from megadit.train.optimizer_state import OwnedSlice, Ownership, assemble, assign, is_copy


@dataclass(frozen=True, slots=True)
class TrainedTensors:
    """Every tensor that training changes."""

    parameters: tuple[tuple[str, nn.Parameter], ...]
    """Those of this rank, under their canonical names; a pipeline stage has copies of what others have, or itself."""
    ownership: Ownership
    averages: WeightAverages
    groups: Groups

    def start_save(self, directory: Path) -> BackgroundWrite:
        """Copies all tensors, and begins to write them into an existing directory; every rank calls this."""
        shards = {}
        for turn, (key, parameter, parts) in enumerate(self._parts()):
            group = self.ownership.group_of(parameter)
            whole = assemble(parameter.shape, parts, group, destination=turn % group.size())
            if whole is not None:
                shards[key] = self._sharded(key, parameter, whole.cpu(), replica=0)
        # Megatron's writer reports through a queue of a manager process that it spawns; no other process is involved
        filesystem_async._results_queue = queue.SimpleQueue()
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
        request = dist_checkpointing.save(shards, str(directory), strategy, async_sharded_save=True)
        return BackgroundWrite(request, directory, prefix=f"__{dist.get_rank()}_")

    def save(self, directory: Path) -> None:
        """Writes all tensors into an existing directory; every rank calls this."""
        self.start_save(directory).finish()

    def load(self, directory: Path, *, step: int) -> None:
        """Reads all tensors as they were after optimizer step `step`; every rank calls this."""
        weights = self._read(directory, model_key)
        for name, parameter in self.parameters:
            assign(parameter, weights[name])  # also those whose masters other ranks own
        with torch.no_grad():
            for owned in self.ownership.slices:
                owned.master.view(-1).copy_(owned.cut(weights[owned.name]))
        for sigma_rel in self.averages.sigma_rels:
            averages = self._read(directory, lambda name, sigma_rel=sigma_rel: ema_key(sigma_rel, name))
            for name, parameter in self.parameters:
                self.averages.restore(sigma_rel, parameter, averages[name])
        self._load_optimizer(directory, step)

    def _load_optimizer(self, directory: Path, step: int) -> None:
        slices = self.ownership.slices
        keys = {optimizer_key(state, owned.name): owned.name for owned in slices for state in owned.state_names}
        tensors = self._read_keys(directory, keys)
        for owned in slices:
            values = {state: owned.cut(tensors[optimizer_key(state, owned.name)]) for state in owned.state_names}
            owned.restore_state(values, step)

    def _parts(self) -> Iterator[tuple[str, nn.Parameter, list[tuple[int, Tensor]]]]:
        """(key, parameter, this rank's parts of it) of every tensor, in the same order on every data-parallel rank."""
        ranges: dict[nn.Parameter, list[tuple[OwnedSlice, int, int]]] = {}
        for owned, start, stop in self.ownership.ranges():
            ranges.setdefault(owned.parameter, []).append((owned, start, stop))
        for name, parameter in self.parameters:
            if is_copy(parameter):
                continue
            mine = ranges.get(parameter, [])
            yield model_key(name), parameter, [_part(o, o.master.detach().reshape(-1), i, j) for o, i, j in mine]
            for sigma_rel in self.averages.sigma_rels:
                yield ema_key(sigma_rel, name), parameter, self.averages.parts(sigma_rel, parameter)
            for state in self.ownership.state_names[name]:
                yield optimizer_key(state, name), parameter, [_part(o, o.state(state), i, j) for o, i, j in mine]

    def _read(self, directory: Path, key_of) -> dict[str, Tensor]:
        """One kind of tensor for every parameter, by the parameter's name."""
        names = {key_of(name): name for name, _ in self.parameters}
        return {names[key]: tensor for key, tensor in self._read_keys(directory, names).items()}

    def _read_keys(self, directory: Path, names: dict[str, str]) -> dict[str, Tensor]:
        parameters = dict(self.parameters)
        shards = {
            key: self._sharded(
                key,
                parameters[name],
                torch.empty(parameters[name].shape, dtype=torch.float32, device=self.groups.device),
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
        return ShardedTensor.from_rank_offsets(key, tensor, *offsets, replica_id=(0, copy, replica))


def _part(owned: OwnedSlice, values: Tensor, start: int, stop: int) -> tuple[int, Tensor]:
    """Elements start..stop of a parameter, from the flat values of an owned slice."""
    return start, values[start - owned.start : stop - owned.start]
