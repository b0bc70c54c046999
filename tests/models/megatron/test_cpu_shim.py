"""The shim, in processes of their own: it patches torch for good, as it has in those from which ranks are forked."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim does nothing where CUDA is present")


def test_cuda_means_the_cpu_and_installing_twice_changes_nothing(run_ranks):
    run_ranks(
        1,
        "-c",
        "import torch; from megadit.models.megatron import cpu_shim; cpu_shim.install()\n"
        "x = torch.zeros(3, device='cuda')\n"
        "assert x.device.type == 'cpu' and x.to('cuda').device.type == 'cpu' and x.cuda() is x\n"
        "assert x.new_empty(2, device='cuda:1', pin_memory=True).device.type == 'cpu'\n"
        "assert torch.empty(1, device=torch.cuda.current_device()).device.type == 'cpu'\n"
        "assert x.type() == 'torch.cuda.FloatTensor' and x.type(torch.float64).dtype == torch.float64\n"
        "assert x.to(torch.float64).dtype == torch.float64\n"
        "with torch.device('meta'): assert torch.zeros(3).is_meta and not torch.empty(3, device='cuda').is_meta\n"
        "with torch.cuda.stream(torch.cuda.Stream()): torch.cuda.synchronize()\n"
        "before = torch.zeros, torch.Tensor.to, torch.distributed.all_gather\n"
        "cpu_shim.install()\n"
        "assert before == (torch.zeros, torch.Tensor.to, torch.distributed.all_gather)",
    )


def test_megatron_comes_without_compiler_and_wandb_and_without_patches_one_rank_is_plain_torch():
    """tests/train/test_layouts.py compares layouts."""
    command = [sys.executable, Path(__file__).parent / "jobs/without_patches.py"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
