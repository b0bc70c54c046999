"""Linear layers give the same numbers and gradients whichever library multiplies, and leave compilers alone."""

import weakref

import pytest
import torch
import torch.nn.functional as F

from megadit.models.configs.config import DiTConfig
from megadit.models.networks.blocks import MLP
from megadit.models.ops import ledger, linear
from megadit.models.ops.crossover import NEVER
from megadit.models.ops.reference import Linear, fuses_gelu

SHAPES = {
    "two dimensions": lambda width: torch.randn(70, width),
    "tokens and batch": lambda width: torch.randn(35, 2, width),
    "batch first": lambda width: torch.randn(2, 35, width).transpose(0, 1),
    "columns of a wider tensor": lambda width: torch.randn(7, 2, 5, width + 9)[..., 3 : 3 + width],
    "one token repeated": lambda width: torch.randn(1, width).expand(70, width),
}
EPS = 1e-6
"""Of the largest number: sums of up to 200 products in float32, in another order."""


@pytest.fixture
def products(monkeypatch) -> list[str]:
    """The activations of the products that oneDNN was asked for, of any size and on any processor."""
    if linear._BY_ONEDNN is None:
        pytest.skip("this torch was built without oneDNN")
    asked, by_onednn = [], linear._BY_ONEDNN

    def counted(x, weight, bias, activation, *rest):
        asked.append(activation)
        return by_onednn(x, weight, bias, activation, *rest)

    monkeypatch.setattr(linear, "_BY_ONEDNN", counted)
    for crossover in (linear.PRODUCT, linear.WITH_GELU, linear.WITH_GRADIENTS):
        monkeypatch.setattr(crossover, "size", 1)
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
            fused = linear.linear(x, layer.weight, layer.bias, form)
            torch.testing.assert_close(fused, F.gelu(expected, approximate=form), rtol=1e-5, atol=1e-5)
    assert products == ["none", "gelu", "gelu"]


def largest_error(shape: str, widths: tuple[int, int], has_bias: bool, is_trained: tuple[bool, bool]) -> float:
    """Of the result, the gradients and a second gradient, beside float64, as a part of the largest number of each."""
    torch.manual_seed(1)
    x, weight, bias = SHAPES[shape](widths[0]), torch.randn(*widths[::-1]), torch.randn(widths[1])
    grad = torch.randn(widths[1], *x.shape[:-1]).movedim(0, -1)  # not contiguous

    def numbers(product, precision) -> list[torch.Tensor]:
        # detached, not copied: x keeps its strides where the precision is its own
        parts = [part.detach().to(precision) for part in (x, weight, bias)]
        leaves = [part.requires_grad_(trained) for part, trained in zip(parts, (*is_trained, has_bias), strict=True)]
        out = product(leaves[0], leaves[1], leaves[2] if has_bias else None)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if not wanted:
            return [out]
        firsts = torch.autograd.grad(out, wanted, grad.to(precision), create_graph=True)
        curved = [first.square().sum() for first in firsts if first.requires_grad]
        seconds = torch.autograd.grad(sum(curved), wanted, allow_unused=True) if curved else []
        return [out, *firsts, *(second for second in seconds if second is not None)]

    ours, exact = numbers(linear.linear, torch.float32), numbers(F.linear, torch.float64)
    assert [each.shape for each in ours] == [each.shape for each in exact]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, exact, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_torch_in_float64(products, shape):
    for widths in ((48, 200), (200, 48), (64, 64)):  # either operand of the weight's gradient is the smaller
        for is_trained in ((True, True), (True, False), (False, True), (False, False)):
            for has_bias in (True, False):
                error = largest_error(shape, widths, has_bias, is_trained)
                assert error < EPS, (widths, is_trained, has_bias)
    assert len(products) >= 60


@pytest.mark.parametrize("transposed", [True, False])
def test_a_product_that_is_a_little_wrong_would_be_noticed(products, monkeypatch, transposed):
    right = linear._BY_ONEDNN

    def wrong(x, weight, *rest):  # in the gradients alone, whose matrices come transposed, or in the result
        out = right(x, weight, *rest)
        return out * (1 + 2 * EPS) if weight.is_contiguous() != transposed else out

    monkeypatch.setattr(linear, "_BY_ONEDNN", wrong)
    assert largest_error("two dimensions", (48, 200), True, (True, True)) > EPS


@pytest.mark.parametrize("shape", [(48,), (0, 2, 48), (1, 48), (9, 0)])
def test_vectors_and_nothing_at_all(products, shape):
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(8, shape[-1], requires_grad=True)
    bias = torch.randn(8, requires_grad=True)
    out = linear.linear(x, weight, bias)
    out.sum().backward()
    assert torch.equal(out, F.linear(x, weight, bias)) and x.grad.shape == x.shape
    assert torch.equal(bias.grad, torch.full((8,), float(out[..., 0].numel())))


def test_the_same_shapes_give_the_same_bits(products):
    torch.manual_seed(2)
    layer, x, grad = Linear(512, 640), torch.randn(300, 512), torch.randn(300, 640)

    def bits() -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()  # at another address
        out = layer(leaf)
        return [out, *torch.autograd.grad(out, [leaf, layer.weight, layer.bias], grad)]

    first, second = bits(), bits()
    assert all(map(torch.equal, first, second)) and products


def test_what_is_computed_again_is_not_kept(products, monkeypatch):
    monkeypatch.setattr(ledger, "SMALL", 0)
    layer, x, values = Linear(48, 80), torch.randn(70, 48, requires_grad=True), []

    @ledger.cheap
    def doubled(x: torch.Tensor) -> torch.Tensor:
        value = 2 * x
        values.append(weakref.ref(value))
        return value

    with ledger.cheap_values_recomputed():
        out = layer(doubled(x))
    assert values[0]() is None and len(values) == 1
    out.sum().backward()
    assert len(values) == 2 and torch.allclose(layer.weight.grad, 2 * x.sum(0).expand(80, 48), rtol=1e-5, atol=1e-5)


def test_what_onednn_is_not_asked_for(products, monkeypatch):
    layer, x = Linear(8, 8), torch.randn(20, 8)
    with torch.no_grad():
        layer(x[: linear.FEWEST_ROWS - 1])
        layer.bfloat16()(x.bfloat16())
        linear.linear(x.bfloat16(), layer.weight, layer.bias, "none")
        assert fuses_gelu(layer) and not fuses_gelu(torch.nn.Linear(8, 8))
        watched = Linear(8, 8)
        handle = watched.register_forward_pre_hook(lambda module, args: None)
        assert not fuses_gelu(watched), "who watches a layer sees it called"
        handle.remove()
        assert fuses_gelu(watched)
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(linear.WITH_GRADIENTS, "size", NEVER)
        layer(x).sum().backward()
        assert layer.weight.grad is not None and not fuses_gelu(layer)
        elsewhere.setattr(linear.WITH_GRADIENTS, "size", 20 * 8 * 8 + 1)
        layer(x).sum().backward()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(20, 9))
    assert not products
    with torch.no_grad():  # and it is asked where nothing speaks against it
        layer(x)
    assert products == ["none"]
    layer(x).sum().backward()
    assert len(products) == 3, "the result, and the weight's gradient"


@pytest.mark.parametrize("family", ["megadit", "dit", "moviegen"])
def test_an_mlp_in_one_pass(products, family):
    own = {"dit": {"num_classes": 3, "crossattn_emb_size": 2, "parameterization": "vp", "position_embedding": "sincos"}}
    config = DiTConfig(family=family, num_layers=1, hidden_size=48, num_attention_heads=4, **own.get(family, {}))
    torch.manual_seed(0)
    mlp, x = MLP(config, 96), torch.randn(30, 2, 48)
    expected = mlp(x)
    assert products == ["none", "none"], "the activation's own backward reads what lies before it"
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-5)
    assert products[2:] == (["none", "none"] if family == "moviegen" else ["gelu", "none"])
