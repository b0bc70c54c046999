import os

import pytest
import torch

from megadit.models.megatron import groups
from megadit.models.megatron.parallel_sizes import ParallelSizes
from megadit.models.shared.errors import UserError


def test_one_process_needs_no_torchrun(run_ranks):
    code = (
        "from megadit.models.configs.config import DiTConfig\n"
        "from megadit.models.megatron import groups\n"
        "found = groups.initialize(groups.ParallelSizes(), DiTConfig())\n"
        "assert found.world_size == found.tensor.size() == found.data.size() == 1 and found.is_first\n"
        "groups.destroy()\n"
        "import torch.distributed as dist; assert not dist.is_initialized()"
    )
    run_ranks(1, "-c", code)


def test_after_an_error_other_ranks_are_not_waited_for(run_ranks):
    """`destroy_process_group` of NCCL waits for ranks that are in a collective without this one."""
    code = (
        "from megadit.models.configs.config import DiTConfig\n"
        "from megadit.models.megatron import groups\n"
        "import torch.distributed as dist\n"
        "ended, destroy = [], dist.destroy_process_group\n"
        "dist.destroy_process_group = lambda: ended.append(True) or destroy()\n"
        "for error in (None, ValueError()):\n"
        "    ended.clear(), groups.initialize(groups.ParallelSizes(), DiTConfig())\n"
        "    try:\n"
        "        with groups.destroyed_at_end():\n"
        "            if error is not None: raise error\n"
        "    except ValueError: pass\n"
        "    assert not dist.is_initialized() and ended == [True] * (error is None), (error, ended)"
    )
    run_ranks(1, "-c", code)


@pytest.mark.parametrize(
    ("layout", "given", "expected"),
    [
        (ParallelSizes(tensor=2), None, "1"),
        (ParallelSizes(tensor=2), "8", "8"),
        (ParallelSizes(context=2), None, None),
        (ParallelSizes(tensor=2, fully_sharded=True), None, None),
    ],
)
def test_tensor_parallelism_alone_asks_cuda_for_one_queue(layout, given, expected, monkeypatch):
    monkeypatch.setattr(os, "environ", {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given})
    groups._order_kernels(layout)
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected


@pytest.mark.parametrize(("rank", "num_gpus"), [(1, 1), (4, 2)])
def test_a_rank_without_a_gpu_is_refused(rank, num_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(UserError, match=f"has {num_gpus} for 8 ranks: start {num_gpus}, or set CUDA_VISIBLE_DEVICES="):
        groups._local_device()
