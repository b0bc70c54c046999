import subprocess
import sys

import pytest

from megadit.models.megatron.groups import ParallelSizes
from megadit.models.support import UserError


@pytest.mark.parametrize(
    ("layout", "ranks", "heads", "words"),
    [
        (ParallelSizes(tensor=3), 4, 6, "does not divide the 4 ranks"),
        (ParallelSizes(tensor=4), 4, 6, "does not divide model.num_attention_heads=6"),
        (ParallelSizes(tensor=0), 4, 6, "tensor_model_parallel_size=0"),
        (ParallelSizes(sequence_parallel=True), 4, 6, "sequence_parallel=true"),
        (ParallelSizes(pipeline=2), 4, 6, "pipeline_model_parallel_size=2 is not available"),
        (ParallelSizes(context=2), 4, 6, "context_parallel_size=2 is not available"),
    ],
)
def test_impossible_layouts(layout, ranks, heads, words):
    with pytest.raises(UserError, match=words):
        layout.check(ranks, heads)


@pytest.mark.parametrize(
    "layout", [ParallelSizes(), ParallelSizes(tensor=2), ParallelSizes(tensor=2, sequence_parallel=True)]
)
def test_possible_layouts(layout):
    layout.check(4, 6)


def test_one_process_needs_no_torchrun():
    code = (
        "from megadit.models.megatron import groups\n"
        "found = groups.initialize(groups.ParallelSizes())\n"
        "assert found.world_size == found.tensor.size() == found.data.size() == 1 and found.is_first\n"
        "groups.destroy()\n"
        "import torch.distributed as dist; assert not dist.is_initialized()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
