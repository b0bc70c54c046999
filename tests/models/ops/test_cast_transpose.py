"""Codes of eight bits and of the transpose, in one pass: Triton's kernel, run by its interpreter on a CPU."""

import pytest
import torch

pytest.importorskip("triton")
from megadit.models.ops.cast_transpose import cast_transposed  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(128, 64), (200, 72), (3, 1)])
def test_codes_are_torchs_and_turned_ones_their_transpose(dtype, shape):
    """Of numbers that codes stand for exactly: the interpreter cuts off where a GPU rounds."""
    exact = torch.randint(0, 120, shape, dtype=torch.uint8).view(dtype).float()
    x, factor = (exact / 4).to(DEVICE, torch.bfloat16), torch.tensor(4.0, device=DEVICE)
    plain, turned = (codes.view(torch.uint8) for codes in cast_transposed(x, factor, dtype, both=True))
    expected = exact.to(dtype).view(torch.uint8).to(DEVICE)
    assert torch.equal(plain, expected) and torch.equal(turned, expected.T)
    none, alone = cast_transposed(x.T.contiguous().T, factor, dtype, both=False)
    assert none is None and torch.equal(alone.view(torch.uint8), turned) and alone.is_contiguous()
