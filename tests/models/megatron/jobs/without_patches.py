"""All of the shim but its patches of torch: how Megatron is imported, that optimizers need the patches, and that a
parallelized network on one rank does not."""

import importlib.util
import sys
from unittest import mock

import torch

from megadit.models.megatron import cpu_shim

PATCHES = ("_redirect_factories", "_redirect_tensor_methods", "_stand_in_for_cuda", "_pad_uneven_all_gather")
before = torch.zeros, torch.Tensor.to, torch.compile
with mock.patch.multiple(cpu_shim, **dict.fromkeys(PATCHES, lambda: None)):
    cpu_shim.install()
assert before == (torch.zeros, torch.Tensor.to, torch.compile)
assert {"megatron.core.optimizer"} <= {*sys.modules} and not {"torch._dynamo", "wandb"} & {*sys.modules}
assert importlib.util.find_spec("wandb") is None or __import__("wandb").__version__, "others may import it"

from megatron.core.jit import jit_fuser  # noqa: E402
from megatron.core.optimizer.optimizer import FP32Optimizer  # noqa: E402

from megadit.models.configs.config import DiTConfig  # noqa: E402
from megadit.models.megatron import groups  # noqa: E402
from megadit.models.megatron.linears.parallel import ColumnLinear  # noqa: E402
from megadit.models.megatron.parallelize import parallelize  # noqa: E402
from megadit.models.megatron.shards import initialize_dit_, splits  # noqa: E402
from megadit.models.megatron.transformer_config import transformer_config  # noqa: E402
from megadit.models.networks.conditioning import Conditioning  # noqa: E402
from megadit.models.networks.dit import DiT  # noqa: E402
from megadit.models.networks.initialize import initialize_  # noqa: E402

CONFIG = DiTConfig(
    num_layers=2, hidden_size=24, num_attention_heads=2, in_channels=3, crossattn_emb_size=8, sigma_data=1.0
)
LINEARS = ("self_attention.qkv", "self_attention.proj", "mlp.fc1", "mlp.fc2",
           "cross_attention.q", "cross_attention.kv", "cross_attention.proj")  # fmt: skip


def run(x):
    return x + 1


def optimizers_need_the_patches():
    assert jit_fuser(run) is run and jit_fuser(dynamic=True)(run) is run
    try:
        FP32Optimizer(torch.optim.SGD([torch.zeros(1)], lr=1.0), None, None)
    except (AssertionError, RuntimeError):
        return
    raise AssertionError("it started")


def parallelized(found, sizes, change=lambda dit: None):
    with torch.device("meta"):
        dit = DiT(CONFIG)
    change(dit)
    settings = transformer_config(CONFIG, sizes, dtype=torch.float32)
    try:
        return parallelize(dit, settings, found, device=torch.device("cpu"))
    except LookupError:
        assert not any(isinstance(module, ColumnLinear) for module in dit.modules()), "nothing was exchanged before"
        raise


def one_rank_is_plain_torch(found, sizes):
    plain, megatron = DiT(CONFIG), parallelized(found, sizes)
    assert [name for name, _ in megatron.named_parameters()] == [name for name, _ in plain.named_parameters()]
    shapes = [{key: value.shape for key, value in model.state_dict().items()} for model in (plain, megatron)]
    assert shapes[0] == shapes[1]

    initialize_(plain, 5)
    initialize_dit_(megatron, 5, found.axes)
    assert all(torch.equal(megatron.state_dict()[key], value) for key, value in plain.state_dict().items())

    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.2)
    assert not any(torch.equal(megatron.state_dict()[key], value) for key, value in plain.state_dict().items())
    megatron.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(megatron.state_dict(), strict=True)

    conditioning = Conditioning(torch.randn(2, 5, 8), torch.tensor([0, 5]), torch.tensor([0.0, 24.0]))
    x, c_noise = torch.randn(2, 3, 2, 4, 4), torch.tensor([-0.5, 0.3])
    assert torch.equal(plain(x, c_noise, conditioning), megatron(x, c_noise, conditioning))
    split = {name for name, parameter in megatron.named_parameters() if splits(parameter)}
    assert split == {f"blocks.{index}.{name}.weight" for index in range(2) for name in LINEARS}


def a_parameter_without_a_row_is_named(found, sizes):
    def add(dit):
        dit.blocks["0"].mlp.adapter = torch.nn.Linear(2, 2)

    try:
        parallelized(found, sizes, add)
    except LookupError as error:
        assert "blocks.0.mlp.adapter.weight" in str(error)
    else:
        raise AssertionError("a parameter without a row")


if __name__ == "__main__":
    optimizers_need_the_patches()
    sizes = groups.ParallelSizes()
    found = groups.initialize(sizes, CONFIG)
    one_rank_is_plain_torch(found, sizes)
    a_parameter_without_a_row_is_named(found, sizes)
    groups.destroy()
