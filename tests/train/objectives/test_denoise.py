"""The objective on packs against the equations, sample by sample."""

import math
from dataclasses import replace

import pytest
import torch
from einops import rearrange

from megadit.models.diffusion.noise import Stream, normal
from megadit.models.diffusion.parameterization import EDM, EDMDenoiser
from megadit.models.networks.conditioning import Conditioning
from megadit.models.networks.dit import DiT
from megadit.models.networks.embeddings import patchify, unpatchify
from megadit.models.networks.initialize import initialize_
from megadit.train.data.packs.packed_batch import PackFormat
from megadit.train.data.packs.training_sample import TrainingSample
from megadit.train.objectives.denoise import token_noise
from megadit.train.objectives.losses import Uncertainty, edm_loss
from megadit.train.recipes import load_recipe
from tests.train.objectives.models import training_model

MODEL = replace(load_recipe("digits_tiny").model, in_channels=4, patch_spatial=2, sigma_data=0.7)
SHAPES = ((1, 4, 4), (2, 4, 6), (2, 2, 2))


def samples():
    generator = torch.Generator().manual_seed(1)
    return [
        TrainingSample(
            sample_id=f"sample-{index}",
            occurrence=0,
            latent_CTHW=0.7 * torch.randn(4, *shape, generator=generator),
            text_LE=torch.randn(index + 1, MODEL.crossattn_emb_size, generator=generator),
            fps=8.0,
        )
        for index, shape in enumerate(SHAPES)
    ]


def pack(chosen, seq_length=40):
    pack_format = PackFormat(model=MODEL, seq_length=seq_length, text_seq_length=16, seed=3, text_dropout=0.0)
    return pack_format.pack(chosen)


@pytest.fixture(scope="module")
def dit():
    model = initialize_(DiT(MODEL), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.norm() == 0:
                generator = torch.Generator().manual_seed(len(name))
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def test_a_pack_has_the_loss_of_its_samples(dit):
    batch = pack(samples())
    sigma_G = torch.tensor([0.2, 1.0, 5.0, 1.0])
    sums = edm_loss(dit, batch, sigma_G, token_noise(batch))
    weighted = squared = 0.0
    for index, sample in enumerate(samples()):
        x0, sigma = sample.latent_CTHW[None], sigma_G[index : index + 1]
        grid = MODEL.token_grid(*x0.shape[2:])
        num_tokens = math.prod(grid)
        noise = normal(batch.noise_key_G[index].repeat(num_tokens), torch.arange(num_tokens), 16, stream=Stream.NOISE)
        n = unpatchify(noise[:, None], grid, MODEL)
        conditioning = Conditioning(sample.text_LE[None], torch.tensor([len(sample.text_LE)]), torch.tensor([8.0]))
        D = EDMDenoiser(dit)(x0 + sigma * n, sigma, conditioning)
        error = (D - x0).square().mean() * num_tokens
        squared += error
        weighted += (sigma**2 + 0.7**2) / (sigma * 0.7) ** 2 * error
    assert sums.error == pytest.approx(squared.item(), rel=1e-5)
    assert sums.weighted == pytest.approx(weighted.item(), rel=1e-5)
    assert sums.objective == sums.weighted


def test_a_pack_has_the_gradients_of_its_samples(dit):
    """Loss and gradients of a pack, and of its samples in packs of their own, added up."""
    model = training_model(dit, learned_uncertainty=True)
    torch.nn.init.normal_(model.uncertainty.linear.weight, generator=torch.Generator().manual_seed(0))
    whole, *single = [samples(), *([sample] for sample in samples())]
    found = []
    for packs in ([whole], single):
        model.zero_grad()
        losses = [model(pack(chosen)).objective for chosen in packs]
        sum(losses).backward()
        found.append((sum(losses).item(), [parameter.grad.clone() for parameter in model.parameters()]))
    (loss, grads), (expected_loss, expected) = found
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    difference, size = (torch.cat([x.flatten() for x in many]).norm() for many in (
        [ours - theirs for ours, theirs in zip(grads, expected, strict=True)], expected,
    ))  # fmt: skip
    assert difference <= 1e-6 * size


@torch.no_grad()
def test_padding_counts_for_nothing(dit):
    small, large = pack(samples(), seq_length=22), pack(samples(), seq_length=60)
    large.tokens_S1P[large.layout.num_tokens :] = 1e3
    of_small = edm_loss(dit, small, torch.ones(len(small.fps_G)), token_noise(small))
    of_large = edm_loss(dit, large, torch.ones(len(large.fps_G)), token_noise(large))
    assert of_small.weighted == pytest.approx(of_large.weighted.item(), rel=1e-5)


def test_noise_belongs_to_the_sample():
    a, b, c = samples()
    one, other = token_noise(pack([a, b, c])), token_noise(pack([c, a]))
    lengths = [math.prod(MODEL.token_grid(*shape)) for shape in SHAPES]
    assert torch.equal(one[: lengths[0]], other[lengths[2] : lengths[2] + lengths[0]])
    assert not torch.equal(one[: lengths[0]], other[: lengths[0]])
    assert torch.equal(token_noise(pack([b]))[: lengths[1]], one[lengths[0] : lengths[0] + lengths[1]])


@torch.no_grad()
def test_a_network_that_knows_nothing_has_loss_one():
    silent = initialize_(DiT(MODEL), seed=0)  # its final layer is zero, so that D = c_skip x
    generator = torch.Generator().manual_seed(2)
    latents = 0.7 * torch.randn(4, 4, 40, 40, generator=generator)
    sample = TrainingSample("large", 0, latents, torch.zeros(0, MODEL.crossattn_emb_size), 8.0)
    batch = pack([sample], seq_length=1600)
    for sigma in (0.05, 1.0, 20.0):
        sums = edm_loss(silent, batch, torch.tensor([sigma, 1.0]), token_noise(batch))
        assert sums.weighted.item() / 1600 == pytest.approx(1, abs=0.05)  # 25,600 numbers: +- 0.01


@torch.no_grad()
def test_noise_preconditioning_and_loss_are_float32_whatever_the_network_is():
    """With the network in bfloat16 and silent: D = c_skip x, whose error at small sigma is far below bfloat16's."""
    silent = initialize_(DiT(MODEL), seed=0).bfloat16()
    batch = pack(samples())
    sigma_G = torch.tensor([0.01, 1.0, 80.0, 1.0])
    noise = token_noise(batch)
    sums = edm_loss(silent, batch, sigma_G, noise)
    tensors = batch.layout.on("cpu")
    segment_S, valid_S = tensors.segment_of_token_S, tensors.is_sample_S
    sigma, x0 = sigma_G.double()[segment_S][:, None, None], batch.tokens_S1P.double()
    variance = MODEL.sigma_data**2
    D = variance / (sigma**2 + variance) * (x0 + sigma * noise.double())
    weight = (sigma**2 + variance) / (sigma**2 * variance)
    expected = (weight * (D - x0) ** 2).mean((1, 2))[valid_S].sum().item()
    assert noise.dtype == sums.weighted.dtype == torch.float32
    assert sums.weighted.item() == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def test_the_flow_loss_is_that_of_the_velocity(dit):
    """|F - (n - x0)|^2 with F read from x_t = (1 - t) x0 + t n at t (arXiv 2403.03206, eq. 13 and 14), written out."""
    flow = DiT(replace(MODEL, parameterization="flow"))
    flow.load_state_dict(dit.state_dict())
    batch, sigma_G = pack(samples()), torch.tensor([0.02, 1.0, 30.0, 1.0])
    noise = token_noise(batch)
    sums = edm_loss(flow, batch, sigma_G, noise)
    tensors, t_G = batch.layout.on("cpu"), sigma_G / (1 + sigma_G)
    t_S = t_G[tensors.segment_of_token_S][:, None, None]
    F_S1P = flow.forward_packed(
        (1 - t_S) * batch.tokens_S1P + t_S * noise, t_G, batch.text_L1E, batch.fps_G, batch.layout
    )
    error_S = (F_S1P - (noise - batch.tokens_S1P)).square().mean((1, 2))
    assert sums.weighted.item() == pytest.approx(error_S[tensors.is_sample_S].sum().item(), rel=1e-4)


@pytest.mark.parametrize("parameterization", ["edm", "flow", "vp"])
def test_uncertainty_divides_and_adds(dit, parameterization):
    """It is one function of sigma in all parameterizations, of EDM's c_noise."""
    network, uncertainty = DiT(replace(MODEL, parameterization=parameterization)), Uncertainty()
    network.load_state_dict(dit.state_dict())
    batch = pack(samples())
    sigma_G = torch.tensor([0.2, 1.0, 5.0, 1.0])
    with torch.no_grad():
        plain = edm_loss(network, batch, sigma_G, token_noise(batch))
        start = edm_loss(network, batch, sigma_G, token_noise(batch), uncertainty)
        assert start.objective == pytest.approx(plain.objective.item())
        uncertainty.linear.weight.normal_(generator=torch.Generator().manual_seed(0))
        sums = edm_loss(network, batch, sigma_G, token_noise(batch), uncertainty)
        parts = [edm_loss(network, pack([s]), sigma_G[[i, 3]], token_noise(pack([s]))) for i, s in enumerate(samples())]
        waves = torch.cos(EDM(0.7).scalings(sigma_G).c_noise[:, None] * uncertainty._frequency + uncertainty._phase)
        u_G = math.sqrt(2 / 128) * waves @ uncertainty.linear.weight[0]
    tokens = [math.prod(MODEL.token_grid(*shape)) for shape in SHAPES]
    expected = sum(
        part.weighted * torch.exp(-u) + u * count for part, u, count in zip(parts, u_G, tokens, strict=False)
    )
    assert sums.objective.item() == pytest.approx(expected.item(), rel=1e-4)
    assert sums.weighted.item() == pytest.approx(plain.weighted.item())


def test_patches_and_noise_have_one_order():
    """Column p of a token's noise is element p of the token, (pt ph pw c)."""
    x = torch.arange(2 * 4 * 4 * 4).view(1, 4, 2, 4, 4)
    assert torch.equal(patchify(x, MODEL)[0, 0], rearrange(x[0, :, :1, :2, :2], "c t h w -> (t h w c)"))


def test_the_training_model_needs_only_a_batch(dit):
    model = training_model(dit, learned_uncertainty=True)
    sums = model(pack(samples()))
    sums.objective.backward()
    assert model.uncertainty.linear.weight.grad.norm() > 0
    assert not sums.weighted.requires_grad
