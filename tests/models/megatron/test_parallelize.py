"""A parallelized network on one rank, without the shim; tests/train/test_layouts.py compares layouts."""

import subprocess
import sys

CODE = """
import torch
from megadit.models.networks.conditioning import Conditioning
from megadit.models.configs.config import DiTConfig
from megadit.models.networks.dit import DiT
from megadit.models.networks.initialize import initialize_
from megadit.models.megatron import groups
from megadit.models.megatron.parallelize import parallelize
from megadit.models.megatron.shards import initialize_dit_, splits
from megadit.models.megatron.transformer_config import transformer_config

config = DiTConfig(
    num_layers=2, hidden_size=24, num_attention_heads=2, in_channels=3, crossattn_emb_size=8, sigma_data=1.0
)
layout = groups.ParallelSizes()
found = groups.initialize(layout, config)
def build():
    with torch.device("meta"):
        dit = DiT(config)
    settings = transformer_config(config, layout, dtype=torch.float32)
    return parallelize(dit, settings, found, device=torch.device("cpu"))
plain, megatron = DiT(config), build()
assert [name for name, _ in megatron.named_parameters()] == [name for name, _ in plain.named_parameters()]
shapes = [{key: value.shape for key, value in model.state_dict().items()} for model in (plain, megatron)]
assert shapes[0] == shapes[1]

initialize_(plain, 5)
initialize_dit_(megatron, 5, found.axes)
assert all(torch.equal(megatron.state_dict()[key], value) for key, value in plain.state_dict().items())

with torch.no_grad():
    for parameter in plain.parameters():
        parameter.normal_(std=0.2)
assert not any(torch.equal(megatron.state_dict()[k], v) for k, v in plain.state_dict().items())
megatron.load_state_dict(plain.state_dict(), strict=True)
plain.load_state_dict(megatron.state_dict(), strict=True)

conditioning = Conditioning(torch.randn(2, 5, 8), torch.tensor([0, 5]), torch.tensor([0.0, 24.0]))
x, c_noise = torch.randn(2, 3, 2, 4, 4), torch.tensor([-0.5, 0.3])
assert torch.equal(plain(x, c_noise, conditioning), megatron(x, c_noise, conditioning))

split = {name for name, parameter in megatron.named_parameters() if splits(parameter)}
assert split == {
    f"blocks.{i}.{name}.weight"
    for i in range(2)
    for name in (
        "self_attention.qkv", "self_attention.proj", "mlp.fc1", "mlp.fc2",
        "cross_attention.q", "cross_attention.kv", "cross_attention.proj",
    )
}

from megadit.models.megatron.linears.parallel import ColumnLinear
with torch.device("meta"):
    dit = DiT(config)
    dit.blocks["0"].mlp.adapter = torch.nn.Linear(2, 2)
try:
    parallelize(dit, transformer_config(config, layout, dtype=torch.float32), found, device=torch.device("cpu"))
except LookupError as error:
    assert "blocks.0.mlp.adapter.weight" in str(error)
else:
    raise AssertionError("a parameter without a row")
assert not any(isinstance(module, ColumnLinear) for module in dit.modules()), "nothing was exchanged before"
groups.destroy()
"""


def test_one_rank_is_plain_torch():
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
