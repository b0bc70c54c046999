"""The value between two functions is computed again in backward, equals what it was, and is not kept until then."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from megadit.models.recompute import through


class Spy:
    """An exponential that counts its calls and does not keep its outputs alive."""

    def __init__(self) -> None:
        self.calls, self.outputs = 0, []

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = Double.apply(x)
        self.outputs.append(weakref.ref(out))
        return out


class Double(torch.autograd.Function):
    """2 x, which saves nothing: only the linear behind it may keep the output."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def inputs() -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(6, 4, bias=False), torch.randn(5, 1, 6, requires_grad=True)


@pytest.mark.parametrize("is_recomputed", [True, False])
def test_only_without_recomputation_is_the_value_kept(is_recomputed):
    linear, x = inputs()
    spy = Spy()
    out = through(spy, x, into=linear) if is_recomputed else linear(spy(x))
    storage_is_kept = spy.outputs[0]() is not None or _keeps_memory_of(out, x.numel(), linear)
    assert storage_is_kept is not is_recomputed
    gradients = torch.autograd.grad(out.square().sum(), (x, linear.weight))
    assert spy.calls == 1 + is_recomputed
    expected = torch.autograd.grad(linear(2 * x).square().sum(), (x, linear.weight))
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(ours, theirs)
