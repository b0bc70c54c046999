"""Noise levels to train on have the distributions that their names say."""

import math

import pytest
import torch

from megadit.models.packing.pack_layout import PackLayout
from megadit.models.packing.segments import Segment
from megadit.train.config.schema import DiffusionConfig
from megadit.train.objectives.denoise import DISTRIBUTIONS, draw_sigma

COUNT = 20_000
LAYOUT = PackLayout.pack([Segment((1, 1, 1), 0)] * COUNT, capacity=COUNT, text_capacity=COUNT)
KEYS = torch.arange(len(LAYOUT.segments)) * 7919


def drawn_t(**settings):
    sigma_G = draw_sigma(KEYS, DiffusionConfig(**settings), LAYOUT).double()
    return sigma_G / (1 + sigma_G)


def largest_gap(t_G, distribution):
    """Of Kolmogorov and Smirnov; 1.95 / sqrt(n) is passed by chance in 0.1 % of cases."""
    ranks = torch.arange(1, len(t_G) + 1) / len(t_G)
    return (distribution(t_G.sort().values) - ranks).abs().max()


LIMIT = 1.95 / math.sqrt(COUNT)


def logit_normal(mean, std):
    return lambda t_G: torch.special.ndtr((torch.logit(t_G) - mean) / std)


def test_a_log_normal_sigma_is_a_logit_normal_t():
    t_G = drawn_t(p_mean=-0.4, p_std=1.3)
    assert largest_gap(t_G, logit_normal(-0.4, 1.3)) < LIMIT
    assert largest_gap(t_G, logit_normal(-0.2, 1.3)) > LIMIT, "negative control"


def test_uniform_and_shifted():
    """A shift s takes t to s t / (1 + (s - 1) t) (arXiv 2403.03206, eq. 23); t is held off 0 and 1 before it."""
    assert largest_gap(drawn_t(noise_levels="uniform"), lambda t_G: t_G) < LIMIT
    shifted = drawn_t(noise_levels="uniform", p_mean=math.log(3.0))
    assert largest_gap(shifted, lambda t_G: t_G / (3 - 2 * t_G)) < LIMIT
    assert largest_gap(shifted, lambda t_G: t_G) > 10 * LIMIT


@pytest.mark.parametrize("scale", [0.5, 1.29, 1.75])
def test_mode_has_its_papers_formula(scale):
    normal_G = torch.linspace(-3.5, 3.5, 101, dtype=torch.float64)
    u_G = torch.special.ndtr(normal_G)
    t_G = 1 - u_G - scale * ((math.pi / 2 * u_G).cos() ** 2 - 1 + u_G)
    sigma_G = DISTRIBUTIONS["mode"](normal_G, 0.0, scale)
    torch.testing.assert_close(sigma_G / (1 + sigma_G), t_G.clamp(1e-4, 1 - 1e-4), rtol=1e-3, atol=1e-6)
    assert (sigma_G.diff() <= 0).all()


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_extremes_stay_within_float32(name):
    sigma_G = DISTRIBUTIONS[name](torch.tensor([-9.0, -5.6, 5.6, 9.0]), 0.5, 1.2)
    assert (sigma_G > 1e-5).all() and (sigma_G < 1e5).all()


def test_larger_samples_get_more_noise():
    layout = PackLayout.pack([Segment((1, 4, 4), 0), Segment((4, 4, 4), 0)], capacity=80, text_capacity=3)
    keys = torch.full((len(layout.segments),), 5)
    plain, shifted = (draw_sigma(keys, DiffusionConfig(shift_tokens=n), layout) for n in (None, 16))
    torch.testing.assert_close((shifted / plain)[:2], torch.tensor([1.0, 2.0]))
    assert layout.segments[2].num_tokens == 0 and shifted[2].log().isfinite(), "the padding of the last text slot"
