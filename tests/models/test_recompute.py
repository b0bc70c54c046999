"""What a linear would save of its input is computed again in backward, and is the same."""

import pytest
import torch
from torch import Tensor, nn

from megadit.models import recompute
from megadit.models.recompute import SMALL, recomputed, through


class Square:
    """x^2, keeping hold of its results, of which the first one is seen by the linear behind it."""

    def __init__(self) -> None:
        self.results: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.results.append(x.square())
        return self.results[-1]


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    monkeypatch.setattr(recompute, "SMALL", 0)


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 4, bias=False)


def gradients(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), inputs)


def test_the_value_is_needed_no_more_after_the_forward(linear):
    """Wiping it out harms nothing, where autograd would otherwise complain that it wants it."""
    x, square = torch.randn(5, 1, 6, requires_grad=True), Square()
    out = through(square, x, into=linear)
    square.results[0].detach().zero_()
    expected = gradients(linear(x.square()), x, linear.weight)
    for ours, theirs in zip(gradients(out, x, linear.weight), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert len(square.results) == 2

    kept = linear(square(x))
    square.results[-1].detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(kept, x, linear.weight)


def test_a_value_in_another_memory_order_is_kept(linear):
    x = torch.randn(6, 5, requires_grad=True)
    square = Square()
    out = through(lambda x: square(x).T, x, into=linear)
    expected = gradients(linear(x.square().T), x, linear.weight)
    for ours, theirs in zip(gradients(out, x, linear.weight), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert len(square.results) == 1


def test_a_small_value_is_kept(linear, monkeypatch):
    x, square = torch.randn(5, 1, 6, requires_grad=True), Square()
    monkeypatch.setattr(recompute, "SMALL", x.numel() + 1)
    through(square, x, into=linear).sum().backward()
    assert len(square.results) == 1


def test_nothing_is_prepared_without_gradients(linear):
    square = Square()
    with torch.no_grad():
        out = through(square, torch.randn(5, 1, 6), into=linear)
    assert not out.requires_grad and len(square.results) == 1


def test_what_is_recomputed_whole_is_computed_twice_and_no_more():
    calls = []

    def sine(x):
        calls.append(1)
        return x.sin()

    x = torch.linspace(0, 1, SMALL).requires_grad_()
    y = recomputed(lambda x: through(sine, x, into=lambda h: h * h), x)
    assert len(calls) == 1
    y.sum().backward()
    assert len(calls) == 2, "a cheap step inside is not computed a third time"
    torch.testing.assert_close(x.grad, torch.sin(2 * x.detach()))


def test_recomputing_keeps_nothing_but_the_input():
    kept = []
    x = torch.ones(SMALL, requires_grad=True)

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    def several(x):
        return x.sin().exp().cos()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        recomputed(several, x)
        assert kept == [SMALL]
        kept.clear()
        several(x)
        assert sum(kept) == 3 * SMALL
