"""The kernel of the noise: by Triton's interpreter the same bits; test_compiled_kernels.py compiles it."""

import pytest
import torch

from megadit.models.diffusion import noise
from megadit.models.ops import fusion

pytest.importorskip("triton", reason="Triton is not installed")
from megadit.models.diffusion import noise_kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def kernels_run_here(monkeypatch):
    """On a CPU by Triton's interpreter (conftest.py)."""
    monkeypatch.setattr(fusion, "KERNELS_ON", {DEVICE})
    monkeypatch.setattr(fusion, "triton_works", lambda device: True)
    noise.kernel_is_exact.cache_clear()
    yield
    noise.kernel_is_exact.cache_clear()


def keys(rows):
    generator = torch.Generator().manual_seed(rows)
    drawn = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return drawn.to(DEVICE), torch.randint(0, 2**40, (rows,), generator=generator).to(DEVICE)


@pytest.mark.parametrize(("rows", "width", "stream"), [(0, 4, 0), (1, 1, 1), (700, 16, 0), (33, 7, 65539), (5, 64, 3)])
def test_bits_are_those_of_the_definition(rows, width, stream):
    key, position = keys(rows)
    found = noise_kernel.normal_by_kernel(key, position, width, stream)
    assert torch.equal(found, noise.normal_by_operations(key, position, width, stream=stream))


def test_every_row_has_its_stream():
    key, position = keys(9)
    stream = torch.tensor([0, 3, 65539] * 3, device=DEVICE)
    found = noise_kernel.normal_by_kernel(key, position, 7, stream)
    for row in range(9):
        here, of_row = slice(row, row + 1), stream[row].item()
        assert torch.equal(found[here], noise.normal_by_operations(key[here], position[here], 7, stream=of_row))
    assert torch.equal(found, noise.normal_by_operations(key, position, 7, stream=stream))


def test_it_is_used_where_kernels_run_and_left_where_it_is_not_exact(monkeypatch):
    key, position = keys(3)
    made = noise.normal_by_operations(key, position, 5, stream=0)
    monkeypatch.setattr(noise, "normal_by_operations", lambda *_, **__: pytest.fail("called"))
    monkeypatch.setattr(noise, "kernel_is_exact", lambda device: True)
    assert torch.equal(noise.normal(key, position, 5, stream=0), made)
    monkeypatch.undo()
    monkeypatch.setattr(fusion, "KERNELS_ON", {DEVICE})
    monkeypatch.setattr(fusion, "triton_works", lambda device: True)
    by_kernel = noise_kernel.normal_by_kernel
    monkeypatch.setattr(noise_kernel, "normal_by_kernel", lambda *given: by_kernel(*given).nextafter(torch.ones(())))
    with pytest.warns(UserWarning, match="not exact on this device"):
        assert torch.equal(noise.normal(key, position, 5, stream=0), made)
