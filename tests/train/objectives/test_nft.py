"""DiffusionNFT: its loss and gradient, and the policy in which it ends."""

from dataclasses import replace

import pytest
import torch

from megadit.models.diffusion.parameterization import parameterization_of
from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.train.data.packs.packed_batch import PackedBatch
from megadit.train.objectives.denoise import draw_sigma, token_noise
from megadit.train.objectives.losses import weighted_error
from megadit.train.objectives.registry import OBJECTIVES
from tests.train.objectives.exact import MODEL, networks, of_normal, pack, sigma_of

POLICY = of_normal(0.7, 0.5)


def doubled(batch):
    extra_G = {"reward": batch.extra_G["reward"].double()}
    return replace(batch, tokens_S1P=batch.tokens_S1P.double(), extra_G=extra_G)


def nft(student, policy, batch, beta, model=MODEL):
    of = networks("diffusion_nft", student, policy, model=model, nft_beta=beta)
    return OBJECTIVES["diffusion_nft"](of, batch), of.config.diffusion


class Student:
    """A denoiser with a parameter."""

    def __init__(self, value=0.3):
        self.value = torch.tensor(value, dtype=torch.float64, requires_grad=True)

    def __call__(self, batch, x_S1P, sigma_G):
        return POLICY(batch, x_S1P, sigma_G) + self.value * x_S1P.sin()


@pytest.mark.parametrize("beta", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("parameterization", ["edm", "flow", "vp"])
def test_equals_the_papers_loss_on_velocities(parameterization, beta):
    """arXiv 2509.16117, eq. 5, with v = (x - D) / sigma, by autograd in float64."""
    model = replace(MODEL, parameterization=parameterization)
    batch, student, other = doubled(pack()), Student(), Student()
    found, diffusion = nft(student, POLICY, batch, beta, model)
    sigma_G = draw_sigma(batch.noise_key_G, diffusion, batch.layout)
    noise_S1P, sigma_S11 = token_noise(batch).double(), sigma_of(batch, sigma_G).double()
    x_S1P = batch.noisy(sigma_G, token_noise(batch))
    noise_S1P = (x_S1P - batch.tokens_S1P) / sigma_S11
    v_S1P, old_S1P = ((x_S1P - D(batch, x_S1P, sigma_G)) / sigma_S11 for D in (other, POLICY))
    r_S11 = sigma_of(batch, batch.extra_G["reward"])
    better_S1P = ((1 - beta) * old_S1P + beta * v_S1P - noise_S1P).square()
    worse_S1P = ((1 + beta) * old_S1P - beta * v_S1P - noise_S1P).square()
    weight_S11 = sigma_of(batch, parameterization_of(model).loss_weight(sigma_G)) * sigma_S11**2
    is_target_S = batch.layout.on("cpu").is_target_S
    each_S1P = weight_S11 * (r_S11 * better_S1P + (1 - r_S11) * worse_S1P)
    expected = each_S1P.mean((1, 2))[is_target_S].sum()
    (of_found,), (of_expected,) = (
        torch.autograd.grad(loss, each.value) for loss, each in ((found.objective, student), (expected, other))
    )
    torch.testing.assert_close(found.objective, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(of_found, of_expected, rtol=1e-10, atol=0)


def test_a_reward_of_one_is_denoising_and_of_a_half_the_policy():
    batch, student = doubled(pack()), Student()
    ones, halves = (
        replace(batch, extra_G={"reward": torch.full((3,), reward, dtype=torch.float64)}) for reward in (1.0, 0.5)
    )
    found, diffusion = nft(student, POLICY, ones, 1.0)
    sigma_G = draw_sigma(batch.noise_key_G, diffusion, batch.layout)
    x_S1P, weight_G = batch.noisy(sigma_G, token_noise(batch)), parameterization_of(MODEL).loss_weight(sigma_G)
    denoising = weighted_error(batch, student(batch, x_S1P, sigma_G), batch.tokens_S1P, weight_G)
    torch.testing.assert_close(found, denoising, rtol=1e-12, atol=0)
    at_the_policy = Student(0.0)
    (gradient,) = torch.autograd.grad(nft(at_the_policy, POLICY, halves, 1.0)[0].objective, at_the_policy.value)
    scale = torch.autograd.grad(nft(at_the_policy, POLICY, ones, 1.0)[0].objective, at_the_policy.value)[0]
    assert abs(gradient) < 1e-12 * abs(scale)


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_ends_in_the_tilted_distribution(beta):
    """Of x0 ~ N(m, s^2) and r = 1/2 + a (x0 - m) the minimum is the denoiser of N(m + 2 a s^2 / beta, s^2): the policy
    tilted by exp(2 a x0 / beta)."""
    mean, deviation, slope, count = 0.7, 0.5, 0.2, 4000
    z = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    z = z[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
    layout = PackLayout.pack([Segment((1, 1, 1), 1)] * count, capacity=count, text_capacity=count)
    shift = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def student(batch, x_S1P, sigma_G):
        return of_normal(mean + shift, deviation)(batch, x_S1P, sigma_G)

    loss = 0
    for number in range(4):
        batch = PackedBatch(
            tokens_S1P=(mean + deviation * z)[:, None, None],
            text_L1E=torch.zeros(count, 1, 1),
            layout=layout,
            fps_G=torch.zeros(count),
            noise_key_G=torch.arange(count) + number * count,
            loss_weight_G=torch.ones(count),
            sample_ids=("",) * count,
            extra_G={"reward": 0.5 + slope * deviation * z},
        )
        loss = loss + nft(student, of_normal(mean, deviation), batch, beta)[0].objective
    (gradient,) = torch.autograd.grad(loss, shift, create_graph=True)
    (curvature,) = torch.autograd.grad(gradient, shift)
    found = -(gradient / curvature).item()  # the loss is quadratic
    assert found == pytest.approx(2 * slope * deviation**2 / beta, rel=0.02)
