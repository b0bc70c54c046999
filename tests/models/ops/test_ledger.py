"""What autograd would save of a cheap value is computed again in backward, and is the same."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from megadit.models.ops import ledger
from megadit.models.ops.ledger import SMALL, cheap, cheap_values_recomputed, recomputed


class Square:
    """x^2, keeping hold of its results, of which the first one is seen by the linear behind it."""

    def __init__(self) -> None:
        self.results: list[Tensor] = []
        self.cheap = cheap(self)

    def __call__(self, x: Tensor) -> Tensor:
        self.results.append(x.square())
        return self.results[-1]

    __name__ = "Square"


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    monkeypatch.setattr(ledger, "SMALL", 0)


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 4, bias=False)


def gradients(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), inputs)


def test_the_value_is_needed_no_more_after_the_forward(linear):
    """Wiping it out harms nothing, where autograd would otherwise complain that it wants it."""
    x, square = torch.randn(5, 1, 6, requires_grad=True), Square()
    with cheap_values_recomputed():
        out = linear(square.cheap(x))
    square.results[0].detach().zero_()
    expected = gradients(linear(x.square()), x, linear.weight)
    for ours, theirs in zip(gradients(out, x, linear.weight), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert len(square.results) == 2

    kept = linear(square(x))
    square.results[-1].detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(kept, x, linear.weight)


def test_a_cheap_value_of_a_cheap_value_keeps_neither(linear):
    x, square = torch.randn(5, 1, 6, requires_grad=True), Square()
    with cheap_values_recomputed():
        squared = square.cheap(x)
        doubled = cheap(lambda x: torch.cat([x, x]))(squared)
        out = linear(doubled)
    for value in (squared, doubled):
        value.detach().zero_()
    expected = gradients(linear(torch.cat([x.square()] * 2)), x, linear.weight)
    for ours, theirs in zip(gradients(out, x, linear.weight), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_value_outside_the_ledger_is_kept(linear):
    x, square = torch.randn(5, 1, 6, requires_grad=True), Square()
    linear(square.cheap(x)).sum().backward()
    with cheap_values_recomputed():
        value = square.cheap(x)
    linear(value).sum().backward()
    assert len(square.results) == 2


def test_a_value_in_another_memory_order_is_kept(linear):
    x, calls = torch.randn(6, 5, requires_grad=True), []

    @cheap
    def turned(x):
        calls.append(1)
        return x.square().T

    with cheap_values_recomputed():
        out = linear(turned(x))
    expected = gradients(linear(x.square().T), x, linear.weight)
    for ours, theirs in zip(gradients(out, x, linear.weight), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert len(calls) == 1


@pytest.mark.parametrize("part", [lambda y: y[1:], lambda y: y.transpose(0, 2), lambda y: y.view(1, 5, 6)[..., :3]])
def test_a_part_of_the_value_is_not_the_value(part):
    x, square = torch.randn(5, 1, 6, requires_grad=True), Square()
    with cheap_values_recomputed():
        out = part(square.cheap(x)) ** 2
    (grad,) = gradients(out, x)
    assert torch.equal(grad, gradients(part(x.square()) ** 2, x)[0])
    assert len(square.results) == 1


def test_a_value_that_changed_is_kept(linear):
    x, square = torch.randn(5, 1, 6, requires_grad=True), Square()
    with cheap_values_recomputed():
        out = linear(square.cheap(x).mul_(2))
    expected = gradients(linear(2 * x.square()), x, linear.weight)
    for ours, theirs in zip(gradients(out, x, linear.weight), expected, strict=True):
        assert torch.equal(ours, theirs)


def gradients_at_a_reused_address(linear: nn.Linear) -> tuple[list[Tensor], list[Tensor], bool]:
    """(gradients, those expected, whether a value at the address of a freed cheap value was saved)."""
    x, weight = torch.randn(300, 6, requires_grad=True), linear.weight
    is_reused = False
    with cheap_values_recomputed():
        first = cheap(torch.square)(x)
        address, storage = first.data_ptr(), first.untyped_storage()._cdata
        total = linear(first).sum()
        del first
        gc.collect()
        others = [x.sin() for _ in range(50)]  # the allocator gives the same memory, C++ the same object, again
        for other in others:
            is_reused |= other.data_ptr() == address or other.untyped_storage()._cdata == storage
            total = total + linear(other).sum()
    ours = torch.autograd.grad(total, (x, weight))
    expected = torch.autograd.grad(linear(x.square()).sum() + 50 * linear(x.sin()).sum(), (x, weight))
    return list(ours), list(expected), is_reused


def tries(linear):
    """What `gradients_at_a_reused_address` gives, until one of a hundred tries was given a freed place again."""
    for _ in range(100):
        found = gradients_at_a_reused_address(linear)
        yield found
        if found[2]:
            return
    pytest.skip("the allocator of this process gave no freed place again")


def test_a_value_at_the_address_of_a_freed_one_is_itself(linear):
    for ours, expected, _ in tries(linear):
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_without_weak_references_a_reused_address_would_be_taken_for_the_value(linear, monkeypatch):
    class Address:
        def __init__(self, storage):
            self.cdata = storage._cdata

    monkeypatch.setattr(ledger, "StorageWeakRef", Address)
    found = (result for _ in range(20) for result in tries(linear))  # an object's address alone counts here
    assert any((ours[1] - expected[1]).norm() > 0.1 * expected[1].norm() for ours, expected, _ in found)


def test_a_small_value_is_kept(linear, monkeypatch):
    x, square = torch.randn(5, 1, 6, requires_grad=True), Square()
    monkeypatch.setattr(ledger, "SMALL", x.numel() + 1)
    with cheap_values_recomputed():
        out = linear(square.cheap(x))
    out.sum().backward()
    assert len(square.results) == 1


def test_nothing_is_prepared_without_gradients(linear):
    square = Square()
    with torch.no_grad(), cheap_values_recomputed():
        out = linear(square.cheap(torch.randn(5, 1, 6)))
    assert not out.requires_grad and len(square.results) == 1


def test_a_closed_ledger_holds_nothing(linear):
    """The inputs of a value that nobody saved go with their last user."""
    x = torch.randn(5, 1, 6, requires_grad=True)
    with cheap_values_recomputed():
        given = x + 1
        seen = weakref.ref(given.untyped_storage())
        out = linear(x * cheap(torch.neg)(given).sum())
        del given
    gc.collect()
    assert out.requires_grad and seen() is None


def test_what_is_recomputed_whole_is_computed_twice_and_no_more():
    calls = []

    @cheap
    def sine(x):
        calls.append(1)
        return x.sin()

    x = torch.linspace(0, 1, SMALL).requires_grad_()
    with cheap_values_recomputed():
        y = recomputed(lambda x: sine(x) ** 2, x)
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
