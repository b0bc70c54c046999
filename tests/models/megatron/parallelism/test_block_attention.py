"""Attention to some of the keys: parts joined are the whole, forwards and backwards."""

import math

import pytest
import torch

from megadit.models.megatron.parallelism import block_attention
from megadit.models.megatron.parallelism.block_attention import (
    attend_block,
    attend_block_backward,
    plain_backward,
    plain_forward,
)


def inputs(num_queries=5, num_keys=9, heads=3, width=8):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, num_queries, heads, width), (2, num_keys, heads, width), (2, num_keys, heads, width)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def reference(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v).transpose(1, 2)


@pytest.fixture(params=["kernel", "definition"])
def kernel(request, monkeypatch):
    if request.param == "definition":
        monkeypatch.setattr(block_attention, "_kernel", lambda q: (plain_forward, plain_backward))


def test_one_block_is_attention(kernel):
    q, k, v = inputs()
    out, lse = attend_block(q, k, v)
    torch.testing.assert_close(out, reference(q, k, v))
    scores = torch.einsum("cqnk,csnk->cqns", q, k) / math.sqrt(8)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_the_backward_of_parts_adds_up(kernel):
    q, k, v = inputs()
    expected = reference(q, k, v)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected.backward(grad)
    with torch.no_grad():
        out, lse = attend_block(q, k, v)
        parts = [attend_block_backward(grad, q, out, lse, k[:, s], v[:, s]) for s in (slice(0, 4), slice(4, 9))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], q.grad)
    torch.testing.assert_close(torch.cat([part[1] for part in parts], 1), k.grad)
    torch.testing.assert_close(torch.cat([part[2] for part in parts], 1), v.grad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_keys", [9, 64])
def test_flash_attention_on_a_gpu(num_keys):
    q, k, v = (x.detach().cuda().bfloat16() for x in inputs(num_keys=num_keys, width=64))
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = attend_block(q, k, v)
    plain_out, plain_lse = plain_forward(*rows)
    torch.testing.assert_close(out.transpose(1, 2), plain_out, rtol=2e-2, atol=2e-2)  # bfloat16 has 8 bits
    torch.testing.assert_close(lse.transpose(1, 2), plain_lse, rtol=1e-3, atol=1e-3)
    grad = torch.ones_like(out)
    found = attend_block_backward(grad, q, out, lse, k, v)
    expected = plain_backward(grad.transpose(1, 2), *rows, plain_out, plain_lse)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.transpose(1, 2).float(), theirs, rtol=5e-2, atol=5e-2)
