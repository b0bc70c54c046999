"""Attention by tiles equals its formula in float64, forward and gradient, and is left where it does not pay."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megadit.models import dense_kernel, linear, tiled_attention
from megadit.models.dense_kernel import dense_kernel as attend

EPS = {torch.float32: 4e-6, torch.bfloat16: 1.5e-2}
"""Of the largest number: float32 sums in another order, and probabilities and results of 8 bits."""


@pytest.fixture
def calls(monkeypatch) -> list[torch.Size]:
    """The queries of every call, where tiles are small and suit any sample and processor."""
    if linear._BY_ONEDNN is None:
        pytest.skip("this torch was built without oneDNN")
    found, forward = [], tiled_attention._like
    monkeypatch.setattr(tiled_attention, "_like", lambda x: (found.append(x.shape), forward(x))[1])
    monkeypatch.setattr(tiled_attention, "is_mkl_slow", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(tiled_attention, "FEWEST", 16)
    monkeypatch.setattr(tiled_attention, "MOST_KEYS", 100)
    monkeypatch.setattr(tiled_attention, "TILE", 16)
    return found


def largest_error(dtype: torch.dtype, sizes: tuple[int, int], size: float) -> float:
    """Beside float64, of the result and the gradients, as a part of the largest number of each."""
    torch.manual_seed(0)
    lengths = (sizes[0], sizes[1], sizes[1])
    # heads side by side, as projections give them, and values among other numbers
    q, k, v = (torch.randn(2, length, 3, 24, dtype=dtype)[..., :20].transpose(1, 2) for length in lengths)
    q, k, grad = size * q, size * k, torch.randn_like(q)

    def numbers(attend, precision) -> list[torch.Tensor]:
        leaves = [x.detach().to(precision).requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad.to(precision))]

    ours = numbers(lambda q, k, v: attend(q, k, v, None), dtype)
    exact = numbers(F.scaled_dot_product_attention, torch.float64)
    assert all(each.dtype == dtype for each in ours)
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, exact, strict=True))


@pytest.mark.parametrize("dtype", EPS)
def test_equals_its_formula(calls, dtype):
    for sizes in ((16, 16), (48, 16), (33, 70), (17, 40)):
        for size in (0.1, 1.0, 3.0):  # nearly uniform, nearly one key
            assert largest_error(dtype, sizes, size) < EPS[dtype], (sizes, size)
    assert len(calls) == 4 * 4 * 3


@pytest.mark.parametrize("dtype", EPS)
def test_a_tile_in_the_wrong_place_would_be_noticed(calls, monkeypatch, dtype):
    right = tiled_attention._probabilities

    def wrong(q, k):
        return ((rows, p.roll(1, 0) if rows.start else p) for rows, p in right(q, k))

    monkeypatch.setattr(tiled_attention, "_probabilities", wrong)
    assert largest_error(dtype, (33, 70), 1.0) > 10 * EPS[dtype]


def test_where_it_is_used(calls, monkeypatch):
    def asked(num_queries=20, num_keys=20, dtype=torch.float32, mask=None) -> bool:
        before = len(calls)
        with torch.no_grad():
            q, k = torch.randn(1, 2, num_queries, 8, dtype=dtype), torch.randn(1, 2, num_keys, 8, dtype=dtype)
            attend(q, k, k, mask)
        return len(calls) > before

    assert asked() and asked(dtype=torch.bfloat16)
    assert asked(num_queries=101, num_keys=100) and not asked(num_keys=101)
    assert not asked(num_queries=15) and not asked(num_keys=15) and not asked(dtype=torch.float64)
    assert not asked(mask=torch.ones(1, 1, 1, 20, dtype=torch.bool))
    with torch.autocast("cpu", torch.bfloat16):
        assert not asked()
    for module, name, value in ((torch, "get_num_threads", 2), (tiled_attention, "is_mkl_slow", False)):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(module, name, lambda value=value: value)
            assert not asked(), name
    monkeypatch.setattr(dense_kernel, "_matmul", SimpleNamespace(fp32_precision="bf16"))
    assert not asked() and not asked(dtype=torch.bfloat16)


def test_the_same_bits_each_time(calls):
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2, 50, 16, requires_grad=True) for _ in range(3))

    def bits() -> list[torch.Tensor]:
        out = attend(q, k, v, None)
        return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    assert all(map(torch.equal, bits(), bits()))
