"""Why `parallel.data_parallel=fsdp` is torch's FSDP2 and not Megatron's: it cuts parameters as LAYOUTS.md says.

Where this fails, Megatron has changed, and its FSDP may be worth another look.
"""

import json

import pytest
import torch

PROGRAM = """
import json
import torch
from megadit.models.megatron import cpu_shim
cpu_shim.install()
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from megadit.models.configs.config import DiTConfig
from megadit.models.megatron import groups
from megadit.models.megatron.parallel_sizes import ParallelSizes

# what it asks of CUDA beside what the shim answers: a number of the device, whatever device it is given, and to wait
torch.cuda.current_device = lambda: 0
cpu_shim._InOrder.wait = lambda event, *stream: None

groups.initialize(ParallelSizes(), DiTConfig(num_layers=1, hidden_size=16, num_attention_heads=1))
settings = DistributedDataParallelConfig(
    use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params", use_distributed_optimizer=True
)
# gloo knows no sum that divides, which it takes without this
config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1, calculate_per_token_loss=True)
network = torch.nn.Sequential(torch.nn.Linear(16, 15))
part = FullyShardedDataParallel(config, settings, network, [torch.nn.Linear], device=torch.device("cpu"))
part(torch.ones(4, 16)).sum().backward()
part.finish_grad_sync()
cuts = {}
for name, parameter in part.module.named_parameters():
    theirs = gather_and_compute_chunk_metadata(parameter)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    cuts[name] = {"theirs": [theirs.offsets[0], theirs.sizes[0]], "torch": [offset[0], shape[0]]}
    held = parameter.grad.to_local()[:, 0].tolist() if parameter.ndim == 2 and parameter.grad is not None else []
    cuts[name]["gradient"] = held
print(json.dumps(cuts))
groups.destroy()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for CUDA")
def test_megatron_s_own_sharding_does_not_cut_as_torch_does(run_ranks):
    first, second = (json.loads(output.splitlines()[-1]) for output in run_ranks(2, "-c", PROGRAM))
    weight, bias = "module.0.weight", "module.0.bias"
    # 255 numbers of one bucket for two ranks, in whole rows: the bias is all on the second one
    assert [first[weight]["theirs"], second[weight]["theirs"]] == [[0, 8], [8, 7]]
    assert [first[bias]["theirs"], second[bias]["theirs"]] == [[0, 0], [0, 15]]
    # torch would cut each alone: what is known of a DTensor beforehand is wrong for these
    assert [first[bias]["torch"], second[bias]["torch"]] == [[0, 8], [8, 7]]
    # it trains here: 4 tokens of each rank reach every row
    assert first[weight]["gradient"] + second[weight]["gradient"] == [8.0] * 15
