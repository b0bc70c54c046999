import gc
from dataclasses import replace

import pytest
import torch

from megadit.infer.runtimes import torch as runtime
from megadit.infer.runtimes.torch import DTYPES, TorchDenoiser, find_device, find_dtype
from megadit.models.bundle import Bundle
from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.denoiser import EDMDenoiser
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.shared.errors import UserError


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


def count_text_reads(denoiser: TorchDenoiser) -> list[str]:
    """A list that grows whenever a part of the network reads text or positions."""
    reads = []
    for name, module in denoiser._denoiser.named_modules():
        if name.endswith((".cross_attention.kv", ".text_embedder", ".positions")):
            module.register_forward_hook(lambda *_, name=name: reads.append(name))
    return reads


def family_inputs(family: str) -> tuple[DiT, torch.Tensor, Conditioning]:
    """A small network of this family with random tensors, latents, and two texts of which one is empty."""
    own = {
        "cosmos": {"adaln_lora_dim": 8},
        "moviegen": {"position_embedding": "learned", "learned_positions": (4, 4, 4)},
    }
    sizes = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "in_channels": 4, "crossattn_emb_size": 6}
    torch.manual_seed(0)
    dit = DiT(DiTConfig(family=family, **sizes, **own.get(family, {})))
    for parameter in dit.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    conditioning = Conditioning(torch.randn(2, 5, 6), torch.tensor([3, 0]), torch.tensor([8.0, 24.0]))
    return dit, torch.randn(2, 4, 2, 4, 6), conditioning


@pytest.mark.parametrize("family", ["megadit", "cosmos", "moviegen", "st_dit"])
def test_text_is_read_once_for_all_noise_levels(family, monkeypatch):
    dit, x, conditioning = family_inputs(family)
    plain, keeping = EDMDenoiser(dit).eval(), TorchDenoiser(dit)
    reads = count_text_reads(keeping)
    sigmas = [torch.full((2,), sigma) for sigma in (9.0, 1.0, 0.1)]
    with torch.no_grad():
        expected = [plain(x, sigma, conditioning) for sigma in sigmas]
    per_call = len(reads) // 3
    assert per_call >= dit.config.num_layers
    reads.clear()
    for sigma, answer in zip(sigmas, expected, strict=True):
        assert torch.equal(keeping(x, sigma, conditioning), answer)  # kept or not, the same numbers
    assert len(reads) == per_call
    # other conditions and other sizes are read anew
    other = replace(conditioning, text_length_B=torch.tensor([2, 5]))
    assert not torch.equal(keeping(x, sigmas[0], other), expected[0]) and len(reads) == 2 * per_call
    keeping(x[:, :, :1], sigmas[0], conditioning)
    assert len(reads) == 3 * per_call
    # what there is no room for is computed at each call
    monkeypatch.setattr(runtime, "CACHE_BYTES", 0)
    without, reads = TorchDenoiser(dit), count_text_reads(keeping)
    for sigma, answer in zip(sigmas, expected, strict=True):
        assert torch.equal(without(x, sigma, conditioning), answer)
    assert len(reads) == 3 * per_call


def test_what_was_kept_goes_with_its_conditions():
    dit, x, conditioning = family_inputs("megadit")
    denoiser = TorchDenoiser(dit)
    denoiser(x, torch.ones(2), conditioning)
    assert len(denoiser._seen) == 1
    del conditioning
    gc.collect()
    assert not len(denoiser._seen)


def test_names_of_types_and_devices():
    assert find_dtype("bf16") is find_dtype("bfloat16") is torch.bfloat16
    assert find_device("cpu").type == "cpu" and find_device("auto").type in ("cpu", "cuda")
    with pytest.raises(UserError, match=f"'int8' is unknown; choose one of {', '.join(DTYPES)}"):
        find_dtype("int8")
    for name in ("abacus", "mps", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(UserError, match=name):
            find_device(name)
