"""Matrices in eight bits: how near they are, what their products give, and what autograd keeps."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megadit.models.configs.config import DiTConfig
from megadit.models.lora.layers import Factors, LowRank, Rows, Target
from megadit.models.megatron.linears.int8 import Int8Linear, Int8Matrix, eight_bits
from megadit.models.megatron.linears.shares import Share
from megadit.models.megatron.plan import COLUMN, ROW, WHOLE, role_of
from megadit.models.networks.dit import DiT


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear_of(matrix_OI):
    layer = Int8Linear(Share(*matrix_OI.shape))
    for name, value in Int8Matrix.of(matrix_OI)._asdict().items():
        getattr(layer, name).data.copy_(value)
    return layer


def test_no_weight_is_further_than_half_of_its_row_s_step():
    matrix_OI = random(64, 256) * torch.logspace(-6, 3, 64)[:, None]
    matrix_OI[5] = 0
    held = Int8Matrix.of(matrix_OI)
    assert held.weight_codes.dtype == torch.int8 and held.weight_codes.abs().max() <= 127
    off_OI = (held.in_precision(torch.float32) - matrix_OI).abs()
    assert (off_OI <= 0.501 * held.weight_steps[:, None]).all()  # and float32's own rounding
    assert (off_OI.amax(1) <= 0.0041 * matrix_OI.abs().amax(1)).all()
    assert not held.in_precision(torch.float32)[5].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_change_of_precision_leaves_steps_as_they_are(dtype):
    steps_O = Int8Matrix.of(random(64, 64) * torch.logspace(-3, 3, 64)[:, None]).weight_steps
    assert torch.equal(steps_O.to(dtype).float(), steps_O)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradient_are_those_of_the_matrix(dtype):
    layer = linear_of(random(48, 32)).to(dtype)
    x_SI = random(7, 32, seed=1).to(dtype).requires_grad_()
    y_SO = layer(x_SI)
    y_SO.backward(random(7, 48, seed=2).to(dtype))
    assert torch.equal(y_SO, x_SI @ layer.weight.T)
    torch.testing.assert_close(x_SI.grad, random(7, 48, seed=2).to(dtype) @ layer.weight)
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_autograd_keeps_codes_and_no_matrix():
    layer, kept = linear_of(random(48, 32)), []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(random(7, 32).requires_grad_())
    assert {(tuple(each.shape), each.dtype) for each in kept} == {((48, 32), torch.int8), ((48,), torch.float32)}


@pytest.mark.parametrize("has_magnitude", [False, True])
def test_an_adapter_without_magnitudes_has_no_matrix_made(has_magnitude, monkeypatch):
    read, of_codes = [], Int8Linear.weight
    monkeypatch.setattr(Int8Linear, "weight", property(lambda layer: read.append(layer) or of_codes.fget(layer)))
    base, x_SI = linear_of(random(48, 32)), random(7, 32)
    target = Target("", Rows(), in_features=32, out_features=48)
    adapter = LowRank({"all": Factors(target, 4, has_magnitude=has_magnitude, like=x_SI)}, 1.0)
    adapter(x_SI, base(x_SI), base)
    assert len(read) == has_magnitude


def test_of_a_network_attention_and_mlp_are_held_in_eight_bits():
    config = DiTConfig(num_layers=1, hidden_size=48, num_attention_heads=4, crossattn_emb_size=16)
    state = {name: random(*value.shape) for name, value in DiT(config).state_dict().items()}
    value = eight_bits(state.__getitem__)
    changed = {name for name in state if not torch.equal(value(name), state[name])}
    of_block = ("self_attention.qkv", "self_attention.proj", "mlp.fc1", "mlp.fc2")
    of_block += tuple(f"cross_attention.{name}" for name in ("q", "kv", "proj"))
    assert changed == {f"blocks.0.{name}.weight" for name in of_block}
    fc1 = "blocks.0.mlp.fc1.weight"
    assert torch.equal(value(f"{fc1}_codes"), Int8Matrix.of(state[fc1]).weight_codes)


def test_ranks_share_codes_and_steps_as_they_share_matrices():
    assert role_of("blocks.0.mlp.fc1.weight_codes") is role_of("blocks.0.mlp.fc1.weight_steps") is COLUMN
    assert role_of("blocks.0.mlp.fc2.weight_codes") is ROW and role_of("blocks.0.mlp.fc2.weight_steps") is WHOLE
