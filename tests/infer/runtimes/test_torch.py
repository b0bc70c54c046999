import pytest
import torch

from megadit.infer.runtimes.torch import DTYPES, TorchDenoiser, find_device, find_dtype
from megadit.models.bundle import Bundle
from megadit.models.conditioning import Conditioning
from megadit.models.support import UserError


@pytest.fixture
def bundle(bundle_dir) -> Bundle:
    return Bundle.open(bundle_dir)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 48, 2, 4, 4, generator=generator)
    text = torch.randn(2, 3, 16, generator=generator)
    conditioning = Conditioning(text, torch.tensor([3, 0]), torch.tensor([8.0, 0.0]))
    return x, torch.tensor([2.0, 0.1]), conditioning


def test_the_network_is_cast_and_its_preconditioning_is_not(bundle, inputs):
    """Near sigma = 0, x0 is c_skip x but for little: float32's precision shows, whatever the network's."""
    x, _, conditioning = inputs
    sigma = torch.full((2,), 1e-6)
    for dtype in ("float32", "bfloat16"):
        denoiser = TorchDenoiser(bundle.load_dit(dtype=find_dtype(dtype)), dtype=find_dtype(dtype))
        assert {parameter.dtype for parameter in denoiser._denoiser.parameters()} == {find_dtype(dtype)}
        x0 = denoiser(x, sigma, conditioning)
        assert x0.dtype == torch.float32 and not x0.requires_grad
        torch.testing.assert_close(x0, x, rtol=0, atol=1e-4)
    # Negative control: x itself would not survive bfloat16 so well.
    assert (x.bfloat16().float() - x).abs().max() > 1e-3


def test_bfloat16_is_close_to_float32(bundle, inputs):
    exact = TorchDenoiser(bundle.load_dit())(*inputs)
    low = TorchDenoiser(bundle.load_dit(), dtype=torch.bfloat16)(*inputs)
    error = (low - exact).norm() / exact.norm()
    assert 1e-6 < error < 2e-2  # bfloat16 rounds to 4e-3


def test_names_of_types_and_devices():
    assert find_dtype("bf16") is find_dtype("bfloat16") is torch.bfloat16
    assert find_device("cpu").type == "cpu" and find_device("auto").type in ("cpu", "cuda")
    with pytest.raises(UserError, match=f"'int8' is unknown; choose one of {', '.join(DTYPES)}"):
        find_dtype("int8")
    for name in ("abacus", "mps", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(UserError, match=name):
            find_device(name)
