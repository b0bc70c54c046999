import subprocess
import sys


def test_one_process_needs_no_torchrun():
    code = (
        "from megadit.models.config import DiTConfig\n"
        "from megadit.models.megatron import groups\n"
        "found = groups.initialize(groups.ParallelSizes(), DiTConfig())\n"
        "assert found.world_size == found.tensor.size() == found.data.size() == 1 and found.is_first\n"
        "groups.destroy()\n"
        "import torch.distributed as dist; assert not dist.is_initialized()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
