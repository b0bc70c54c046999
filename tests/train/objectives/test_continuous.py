"""Consistency in continuous time: its tangent, on networks whose answers are known, beside the paper's own coordinates
and the discrete objective."""

import math
from dataclasses import replace

import pytest
import torch

from megadit.train.config.schema import DiffusionConfig
from megadit.train.objectives import denoise
from megadit.train.objectives.denoise import draw_sigma, token_noise
from megadit.train.objectives.distillation import LEAST_TANGENT, _drawn_interval
from tests.train.objectives.test_distillation import DEVIATION, MEAN, MODEL, TEACHER, pack, sigma_of
from tests.train.objectives.test_distillation import loss as of_networks

SIGMA_D = MODEL.sigma_data
SCALE = 1.3


def double_pack():
    batch = pack()
    return replace(batch, tokens_S1P=batch.tokens_S1P.double())


class Student:
    """A denoiser with a number to learn, curved in x and sigma."""

    def __init__(self):
        self.weight = torch.tensor(SCALE, dtype=torch.float64, requires_grad=True)

    def __call__(self, batch, x_S1P, sigma_G):
        sigma = sigma_of(batch, sigma_G)
        c_in = (sigma**2 + SIGMA_D**2).rsqrt()
        raw = torch.sin(self.weight * c_in * x_S1P + sigma.log() / 4)
        return SIGMA_D**2 * c_in**2 * x_S1P + sigma * SIGMA_D * c_in * raw

    def gradient(self, loss):
        self.weight.grad = None
        loss.backward()
        return self.weight.grad.item()


def loss(objective, student, *, batch=None, **settings):
    return of_networks(objective, student, TEACHER, batch=double_pack() if batch is None else batch, **settings)


def algorithm_1(student, batch, r):
    """Lu and Song, arXiv 2410.11081, algorithm 1, in t, x_t = cos(t) x0 + sin(t) z and F of TrigFlow: the loss of each
    sample's tokens, and the tangent."""
    sigma_G = draw_sigma(batch.noise_key_G, DiffusionConfig(), batch.layout)
    t_G = (sigma_G.double() / SIGMA_D).atan()
    t = sigma_of(batch, t_G)
    z = SIGMA_D * token_noise(batch).double()
    x_t = t.cos() * batch.tokens_S1P + t.sin() * z

    def F(denoiser, x_t, t_G):
        t = sigma_of(batch, t_G)
        D = denoiser(batch, x_t / t.cos(), SIGMA_D * t_G.tan())
        return (t.cos() * x_t - D) / (t.sin() * SIGMA_D)

    dxdt = SIGMA_D * F(TEACHER, x_t, t_G)
    directions = (t.cos() * t.sin() * dxdt, t_G.cos() * t_G.sin())
    _, dFdt = torch.func.jvp(lambda x_t, t_G: F(student, x_t, t_G), (x_t, t_G), directions)
    F_theta = F(student, x_t, t_G)
    F_minus, dFdt = F_theta.detach(), dFdt.detach()
    g = -(t.cos() ** 2) * (SIGMA_D * F_minus - dxdt) - r * (t.cos() * t.sin() * x_t + SIGMA_D * dFdt)
    segment_S = batch.layout.on("cpu").segment_of_token_S
    for sample in range(2):
        own = segment_S == sample
        g[own] = g[own] / (g[own].square().mean().sqrt() + LEAST_TANGENT)
    return (F_theta - F_minus - g).square().mean(dim=(1, 2)), g


@pytest.mark.parametrize("r", [0.25, 1.0])
def test_it_is_the_papers_algorithm(r):
    student, batch = Student(), double_pack()
    is_sample_S = batch.layout.on("cpu").is_sample_S
    expected_S, g_S1P = algorithm_1(student, batch, r)
    ours = loss("continuous_consistency", student, step=int(100 * r), tangent_warmup=100)
    assert ours.weighted.item() == pytest.approx(expected_S[is_sample_S].sum().item(), rel=1e-5)
    assert ours.weighted.item() == pytest.approx(g_S1P[is_sample_S].square().mean(dim=(1, 2)).sum().item(), rel=1e-5)
    gradients = student.gradient(ours.objective), student.gradient(expected_S[is_sample_S].sum())
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-4) and abs(gradients[1]) > 1e-3


def test_the_tangent_comes_in():
    found = [
        loss("continuous_consistency", Student(), step=step, tangent_warmup=100).weighted.item()
        for step in (50, 99, 100)
    ]
    assert len(set(found)) == 3
    assert loss("continuous_consistency", Student(), step=7, tangent_warmup=0).weighted.item() == found[-1]


def test_the_limit_has_the_gradient_of_levels_that_come_together():
    """Song et al., arXiv 2303.01469, appendix B.1: of levels a step apart, the gradient of the discrete objective is
    that of the limit, but for what the step makes of it."""
    sigma, student, batch = 1.7, Student(), double_pack()
    while _drawn_interval(batch, (sigma, 1.0))[0][:2].tolist() != [pytest.approx(sigma)] * 2:
        batch = replace(batch, noise_key_G=batch.noise_key_G + 1)  # until both samples are at the highest level
    at_sigma = DiffusionConfig(p_mean=math.log(sigma), p_std=1e-9)
    limit = student.gradient(loss("consistency_limit", student, batch=batch, diffusion=at_sigma).objective)
    off = []
    for step in (0.1, 0.01):
        discrete = loss("consistency", student, batch=batch, sigmas=(sigma, sigma - step))
        off.append(abs(student.gradient(discrete.objective) / limit - 1))
    assert off[0] < 0.2 and off[1] < 0.12 * off[0], "the first order of the step"


@pytest.mark.parametrize("objective", ["continuous_consistency", "consistency_limit"])
def test_the_end_of_the_ode_has_no_tangent(objective):
    def end(batch, x_S1P, sigma_G):
        return MEAN + (x_S1P - MEAN) * DEVIATION / (DEVIATION**2 + sigma_of(batch, sigma_G) ** 2).sqrt()

    settings = {"tangent_warmup": 0} if objective == "continuous_consistency" else {}
    of_end, of_others = (loss(objective, each, **settings).weighted.item() for each in (end, TEACHER))
    assert of_end < 1e-10 < 1e-3 < of_others


def test_what_is_learnt_of_the_losses_size_weighs_it():
    plain = loss("continuous_consistency", Student())
    weighed = loss("continuous_consistency", Student(), uncertainty=lambda sigma_G: torch.full_like(sigma_G, 0.5))
    num_tokens = double_pack().num_tokens
    expected = plain.weighted.item() / torch.tensor(0.5).exp().item() + 0.5 * num_tokens
    assert weighed.weighted.item() == pytest.approx(plain.weighted.item())
    assert weighed.objective.item() == pytest.approx(expected, rel=1e-5)


def test_a_tangent_is_that_of_whole_samples(monkeypatch):
    """Its size is a mean over a sample, whose parts others may have."""
    summed = []

    def add(sums, group):
        summed.append(sums.clone())
        return 2 * sums

    monkeypatch.setattr(denoise, "summed", add)
    loss("continuous_consistency", Student())
    assert len(summed) == 1 and summed[0][1].tolist()[:2] == [4, 8], "tokens of each sample"
