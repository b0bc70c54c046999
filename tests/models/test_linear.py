"""Linear layers give the same numbers whichever library multiplies, and leave gradients and compilers alone."""

import pytest
import torch
import torch.nn.functional as F

from megadit.models import linear
from megadit.models.blocks import MLP
from megadit.models.config import DiTConfig
from megadit.models.layers import TorchLayers
from megadit.models.linear import Linear, linear_gelu


@pytest.fixture
def products(monkeypatch) -> list[str]:
    """The activations of the products that oneDNN was asked for."""
    if linear._BY_ONEDNN is None:
        pytest.skip("this torch was built without oneDNN")
    asked, by_onednn = [], linear._BY_ONEDNN

    def counted(x, weight, bias, activation, *rest):
        asked.append(activation)
        return by_onednn(x, weight, bias, activation, *rest)

    monkeypatch.setattr(linear, "_BY_ONEDNN", counted)
    return asked


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [linear.FEWEST_ROWS, 100])
def test_products_are_those_of_torch_in_float32(products, bias, rows):
    torch.manual_seed(0)
    layer, x = Linear(48, 80, bias=bias), torch.randn(3, rows, 48).transpose(0, 1)  # not contiguous
    expected = F.linear(x, layer.weight, layer.bias)
    with torch.no_grad():
        # a sum of 48 products of size 1, in another order, in float32
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
        for form in ("none", "tanh"):
            fused = linear_gelu(layer, x, form)
            torch.testing.assert_close(fused, F.gelu(expected, approximate=form), rtol=1e-5, atol=1e-5)
    assert products == ["none", "gelu", "gelu"]


def test_what_onednn_is_not_asked_for(products, monkeypatch):
    layer, x = Linear(8, 8), torch.randn(20, 8)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        layer(x[: linear.FEWEST_ROWS - 1])
        layer.bfloat16()(x.bfloat16())
        assert (
            linear_gelu(layer, x.bfloat16(), "none") is None and linear_gelu(torch.nn.Linear(8, 8), x, "none") is None
        )
        watched = Linear(8, 8)
        handle = watched.register_forward_pre_hook(lambda module, args: None)
        assert linear_gelu(watched, x, "none") is None, "who watches a layer sees it called"
        handle.remove()
    assert not products
    with torch.no_grad():  # and it is asked where nothing speaks against it
        layer.float()(x)
    assert products == ["none"]


@pytest.mark.parametrize("family", ["megadit", "dit", "moviegen"])
def test_an_mlp_in_one_pass(products, family):
    own = {"dit": {"num_classes": 3, "crossattn_emb_size": 2, "preconditioner": "vp", "position_embedding": "sincos"}}
    config = DiTConfig(family=family, num_layers=1, hidden_size=48, num_attention_heads=4, **own.get(family, {}))
    torch.manual_seed(0)
    mlp, x = MLP(config, TorchLayers(), 96), torch.randn(30, 2, 48)
    expected = mlp(x)
    assert not products
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-5)
    assert products == (["none", "none"] if family == "moviegen" else ["gelu", "none"])
