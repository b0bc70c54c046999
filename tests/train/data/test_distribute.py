"""A micro-batch reaches the ranks of its replica by two collectives: its description, and all of its tensors."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megadit.models.packing.segments import TokenMesh
from megadit.train.config.load import resolve_config
from megadit.train.data.distribute import SharedBatches
from megadit.train.data.loader import build_train_loader

RUN = resolve_config("digits_tiny", overrides=["data.mock=true", "data.num_workers=0"])


@pytest.fixture
def collectives(monkeypatch):
    """Two ranks in turn: what the first has sent, the second gets; their names."""
    sent, names = [], []

    def pass_on(name, put, get):
        def collective(given, source, group):
            assert source == 0
            names.append(f"{name} of rank {group.rank()}")
            if group.rank() == 0:
                sent.append(get(given))
            else:
                put(given, sent.pop(0))

        return collective

    objects = pass_on("objects", lambda given, value: given.__setitem__(0, value), lambda given: given[0])
    monkeypatch.setattr(dist, "broadcast_object_list", objects)
    monkeypatch.setattr(dist, "broadcast", pass_on("tensors", torch.Tensor.copy_, torch.Tensor.clone))
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    return names


def of_rank(rank):
    copy = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
    alone = SimpleNamespace(size=1)
    return SimpleNamespace(device=torch.device("cpu"), copy=copy, mesh=TokenMesh(), context=alone)


def test_a_micro_batch_is_one_block(collectives):
    [batch] = (batch for batch, _ in zip(build_train_loader(RUN, rank=0, world_size=1), range(1), strict=False))
    batch = replace(batch, extra_G={"seed_key": batch.noise_key_G + 1, "reward": batch.fps_G / 9})
    first, second = (next(SharedBatches(read, RUN, of_rank(rank))) for rank, read in enumerate([iter([batch]), None]))
    assert collectives == [f"{what} of rank {rank}" for rank in (0, 1) for what in ("objects", "tensors")]
    for found in (first, second):
        assert [*found.tensors] == [*batch.tensors], "an order that is the same on all ranks"
        assert all(torch.equal(tensor, batch.tensors[name]) for name, tensor in found.tensors.items())
    assert second.layout.segments == batch.layout.segments and second.sample_ids == batch.sample_ids


def test_the_end_is_announced(collectives):
    for rank, read in enumerate([iter([]), None]):
        with pytest.raises(StopIteration):
            next(SharedBatches(read, RUN, of_rank(rank)))
    assert collectives == ["objects of rank 0", "objects of rank 1"]
