"""A checkpoint is read into the host's memory, a part at a time: a GPU that a run fills has no room for it."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch import nn

from megadit.train.checkpoints import tensors as checkpoint_tensors
from megadit.train.checkpoints.tensors import TrainedTensors
from megadit.train.optim.adamw import HalfMomentAdamW
from megadit.train.optim.state import OwnedSlice

SHAPES = {"a.weight": (6, 4), "b.weight": (3, 4), "c.weight": (40, 4), "d.bias": (5,)}
GPU = torch.device("meta")


@pytest.fixture
def read(monkeypatch):
    """What each call of Megatron's reader was asked for: {key: tensor}."""
    asked = []

    def load(shards, directory, validate_access_integrity):
        asked.append({key: shard.data for key, shard in shards.items()})
        return {key: torch.ones_like(shard.data) for key, shard in shards.items()}

    monkeypatch.setattr(dist_checkpointing, "load", load)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", lambda counts, mine: counts.__setitem__(slice(2), [mine, mine + 1]))
    return asked


def tensors(device):
    """Of a network whose parameters one rank holds, with an average."""
    parameters = {name: nn.Parameter(torch.zeros(shape, device=device)) for name, shape in SHAPES.items()}
    optimizer = HalfMomentAdamW(
        [{"params": list(parameters.values())}], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0
    )
    slices = tuple(OwnedSlice(name, p, 0, p.numel(), p.detach(), p, optimizer) for name, p in parameters.items())
    ownership = SimpleNamespace(slices=slices, group_of=lambda parameter: SimpleNamespace(rank=lambda: 0))
    ema_weights = SimpleNamespace(sigma_rels=(0.1,), restore=lambda sigma_rel, parameter, whole: None)
    groups = SimpleNamespace(device=device, axes={}, tensor=SimpleNamespace(rank=lambda: 0))
    return TrainedTensors(tuple(parameters.items()), ownership, ema_weights, groups), optimizer


def test_it_is_read_on_the_host_and_by_parts(read, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint_tensors, "READ_AT_ONCE", 320)
    trained, optimizer = tensors(GPU)
    trained.load(tmp_path, step=3)
    wanted = [tensor for call in read for tensor in call.values()]
    assert wanted and all(tensor.device.type == "cpu" for tensor in wanted)
    # weights with their averages in three parts, moments in three; another rank has one part more
    assert [len(call) for call in read] == [4, 2, 2, 0, 4, 2, 2, 0]
    assert max(sum(t.nbytes for t in call.values()) for call in read if len(call) > 2) <= 320
    assert all(state["exp_avg"].device.type == "meta" for state in optimizer.state.values())
    assert all(group["step"] == 3 for group in optimizer.param_groups)


def test_all_of_it_arrives(read, tmp_path):
    trained, optimizer = tensors(torch.device("cpu"))
    trained.load(tmp_path, step=3)
    assert len(read) == 4, "small networks are read at once"
    for _, parameter in trained.parameters:
        assert (parameter == 1).all() and (optimizer.state[parameter]["exp_avg_sq"] == 1).all()


def test_tensors_leave_a_gpu_by_copies_that_all_are_done(monkeypatch):
    """The names of what was copied when copies were finished are those of all tensors that are written."""
    copied, finished = [], []

    class Copies:
        def __init__(self, device):
            assert device == torch.device("cuda")

        def copy(self, tensor):
            copied.append(tensor)
            return f"{tensor} here"

        def finish(self):
            finished.extend(copied)

    monkeypatch.setattr(checkpoint_tensors, "HostCopies", Copies)
    monkeypatch.setattr(checkpoint_tensors, "assemble", lambda shape, parts, group, destination: parts)
    parameter = torch.ones(1)
    trained = SimpleNamespace(
        groups=SimpleNamespace(device=torch.device("cuda")),
        ownership=SimpleNamespace(group_of=lambda parameter: SimpleNamespace(size=lambda: 1)),
        prefix="",
        _owned_slices=lambda: [("a", parameter, "whole a"), ("b", parameter, None), ("c", parameter, "whole c")],
        _sharded=lambda key, parameter, tensor, replica: tensor,
    )
    assert TrainedTensors._shards(trained) == {"a": "whole a here", "c": "whole c here"}
    assert finished == ["whole a", "whole c"]
