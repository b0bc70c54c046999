"""Why `parallel.data_parallel=fsdp` is torch's FSDP2 and not Megatron's: what that needs is still as LAYOUTS.md says.

Where this fails, Megatron has changed, and its FSDP may be worth another look.
"""

import pytest
import torch

PROGRAM = """
import inspect
import torch
from megadit.models.megatron import cpu_shim
cpu_shim.install()
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
from megatron.core.transformer.transformer_config import TransformerConfig
from megadit.models.config import DiTConfig
from megadit.models.megatron import groups
from megadit.models.megatron.parallel_sizes import ParallelSizes

groups.initialize(ParallelSizes(), DiTConfig(num_layers=1, hidden_size=16, num_attention_heads=1))
settings = DistributedDataParallelConfig(
    use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params", use_distributed_optimizer=True
)
# ranks have to ask one another which rows of a parameter they hold
assert "all_gather_object" in inspect.getsource(uneven_dtensor.gather_and_compute_chunk_metadata)
try:
    mcore_fsdp_adapter.FullyShardedDataParallel(
        config=TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1),
        ddp_config=settings,
        module=torch.nn.Linear(16, 16),
        fsdp_unit_modules=[torch.nn.Linear],
        device=torch.device("cpu"),
    )
except RuntimeError as error:
    print(f"refused: {error}")
groups.destroy()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="what it does without CUDA")
def test_megatron_s_own_sharding_needs_cuda(run_ranks):
    (output,) = run_ranks(1, "-c", PROGRAM)
    assert "refused: " in output and "cuda" in output
