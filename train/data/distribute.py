"""Micro-batches for every rank: one reader per data-parallel rank sends its batches to the ranks of its replica.

Each of these keeps its context-parallel shard of the tokens.

Shapes: S video tokens, L text tokens, G segments.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megadit.models.configs.config import DiTConfig
from megadit.models.host_to_device import Need, SideStream, block_bytes, send_with, unpacked
from megadit.models.megatron.groups import Groups
from megadit.models.megatron.parallelism.context import context_needs
from megadit.models.megatron.parallelism.experts import choice_needs
from megadit.models.networks.axial import axial_needs
from megadit.models.networks.clip import texts_as_segments
from megadit.models.packing.pack_layout import PackLayout, computed
from megadit.train.config.schema import RunConfig
from megadit.train.data.loader import build_train_loader, build_validation_loader
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.data.redistribute import redistribute


class SharedBatches:
    """Iterator of micro-batches on this rank's device, or being copied there: wait with `arrived`. All ranks of a model
    replica iterate together.

    A replica on one GPU gets its micro-batches on a separate CUDA stream, so that copies overlap with computation.
    """

    def __init__(self, batches: Iterator[PackedBatch] | None, config: RunConfig, groups: Groups) -> None:
        """`batches`: None on ranks without a reader."""
        self._batches = batches
        self._config = config
        self._groups = groups
        is_alone = groups.device.type == "cuda" and groups.copy.size() == 1
        self._side = SideStream(groups.device) if is_alone else None

    def __iter__(self) -> "SharedBatches":
        return self

    def __next__(self) -> PackedBatch:
        groups = self._groups
        read = next(self._batches, None) if self._batches is not None else None
        batch = read if groups.copy.size() == 1 else _announced(read, groups)
        if batch is None:
            raise StopIteration
        own = batch.layout.shard(groups.mesh)
        needs = _needs(own, self._config, groups)
        if read is None:
            send_with(needs, (), groups.device)
        else:
            batch = batch.to(groups.device, needs, self._side)
        if groups.copy.size() > 1:
            batch = _broadcast(batch, groups)
        return batch.cut(own)


def _needs(layout: PackLayout, config: RunConfig, groups: Groups) -> list[Need]:
    """Layout tensors of a pack that a device needs, sent with the batch in one copy per micro-batch.

    Tensors missing here are copied separately, where they are first read.
    """
    needs = _network_needs(layout, config.model, groups)
    if config.train.distill is not None and config.train.distill.guidance != 1:
        needs += _network_needs(layout.without_text, config.model, groups)
    return needs


def _network_needs(layout: PackLayout, model: DiTConfig, groups: Groups) -> list[Need]:
    needs = [computed(layout)]
    if model.structure.block == "st_dit":
        needs += axial_needs(layout)
    if model.task == "match":
        needs.append(computed(layout.memo(texts_as_segments)))
    if groups.context.size > 1:
        needs += context_needs(layout, groups.context)
        if model.experts is not None and model.experts.routing == "expert_choice":
            needs += choice_needs(layout)
    return needs


def _announced(read: PackedBatch | None, groups: Groups) -> PackedBatch | None:
    """The batch that the first rank of a replica has read; on other ranks with tensors of its shapes alone, which have
    no memory."""
    description = [None if read is None else _describe(read)]
    dist.broadcast_object_list(description, dist.get_global_rank(groups.copy, 0), group=groups.copy)
    if read is not None or description[0] is None:
        return read
    segments, sample_ids, refused, shapes = description[0]
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    return PackedBatch.of_tensors(empty, layout=PackLayout(segments), sample_ids=sample_ids, refused=refused)


def _describe(batch: PackedBatch) -> tuple[Any, ...]:
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in batch.tensors.items()}
    return batch.layout.segments, batch.sample_ids, batch.refused, shapes


def _broadcast(batch: PackedBatch, groups: Groups) -> PackedBatch:
    """The batch of the first rank of a replica, by one collective for all of its tensors."""
    like = [*batch.tensors.values()]
    block = torch.empty(block_bytes(like), dtype=torch.uint8, device=groups.device)
    tensors = unpacked(block, like)
    if groups.copy.rank() == 0:
        for there, here in zip(tensors, like, strict=True):
            there.copy_(here)
    dist.broadcast(block, dist.get_global_rank(groups.copy, 0), group=groups.copy)
    return batch.with_tensors(dict(zip(batch.tensors, tensors, strict=True)))


class TrainBatches(SharedBatches):
    """Endless training micro-batches of this rank."""

    def __init__(self, config: RunConfig, groups: Groups) -> None:
        self._loader = _build(build_train_loader, config, groups)
        super().__init__(None, config, groups)

    def __next__(self) -> PackedBatch:
        if self._loader is not None and self._batches is None:
            self._batches = iter(self._loader)
        return super().__next__()

    def save_state(self) -> Any:
        """State of this data-parallel rank's reader (JSON values); None on ranks without a reader."""
        return None if self._loader is None else self._loader.save_state()

    def restore_state(self, saved: Sequence[Any]) -> str | None:
        """Continue from the saved states of all data-parallel ranks (their number may differ); call it before the first
        batch.

        Returns:
            a note for the user on what differs from an uninterrupted run; None if nothing does.
        """
        if self._loader is None:
            return None
        data = self._config.data
        mine = redistribute(
            saved,
            rank=self._groups.readers.rank(),
            world_size=self._groups.readers.size(),
            num_workers=data.num_workers,
            micro_batches=data.global_batch_size // data.micro_batch_size,
        )
        self._loader.restore_state(mine.state)
        return mine.said


def validation_batches(config: RunConfig, groups: Groups, *, of_all: bool = False) -> SharedBatches:
    """This rank's packs of the validation split, from the first one on; with `of_all`, those of all ranks."""
    loader = _build(build_validation_loader, config, groups, is_alone=of_all)
    return SharedBatches(None if loader is None else iter(loader), config, groups)


def _build(build, config: RunConfig, groups: Groups, *, is_alone: bool = False) -> Any:
    """A loader on the first rank of each model replica, None on the others."""
    if groups.copy.rank() > 0:
        return None
    if is_alone:
        return build(config, rank=0, world_size=1)
    return build(config, rank=groups.readers.rank(), world_size=groups.readers.size(), group=groups.readers)
