import pytest
import torch

from megadit.models.dense_kernel import dense_kernel


@pytest.fixture
def bf16_products():
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    yield matmul
    matmul.fp32_precision = before


def attend(mask, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 2, 12, 16), (3, 2, 7, 16), (3, 2, 7, 16)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = dense_kernel(q, k, v, mask)
    return [out, *torch.autograd.grad(out, (q, k, v), torch.cos(out.detach()))]


@pytest.mark.parametrize("has_mask", [False, True])
def test_attention_keeps_its_precision_when_products_may_lose_theirs(bf16_products, has_mask):
    mask = torch.arange(7) < torch.tensor([7, 1, 4])[:, None] if has_mask else None
    mask = None if mask is None else mask[:, None, None]
    for fast, exact in zip(attend(mask, torch.float32), attend(mask, torch.float64), strict=True):
        assert (fast - exact).abs().max() <= 2e-6 * exact.abs().max()
    assert bf16_products.fp32_precision == "bf16"
