"""Guidance around a denoiser that is linear in its text, so that every result is known in closed form."""

import pytest
import torch

from megadit.infer.guidance import classifier_free_guidance, guidance_scale
from megadit.models.conditioning import Conditioning
from megadit.models.support import UserError


class LinearDenoiser:
    """D(x, sigma, c) = x + sigma * (sum of the valid text features) - fps / 100; counts what it is asked."""

    def __init__(self):
        self.batch_sizes = []

    def __call__(self, x, sigma_B, conditioning):
        self.batch_sizes.append(len(x))
        assert len(conditioning) == len(x) == len(sigma_B)
        L = conditioning.text_BLE.shape[1]
        valid_BL = torch.arange(L) < conditioning.text_length_B[:, None]
        text_B = (conditioning.text_BLE.sum(-1) * valid_BL).sum(-1)
        return x + (sigma_B * text_B - conditioning.fps_B / 100).reshape(-1, 1, 1, 1, 1)


def conditioning(*texts: list[float]) -> Conditioning:
    """One feature per word; padded with a value that must not count."""
    longest = max(map(len, texts))
    padded = [text + [99.0] * (longest - len(text)) for text in texts]
    lengths = torch.tensor([len(text) for text in texts])
    return Conditioning(torch.tensor(padded)[..., None], lengths, torch.full((len(texts),), 8.0))


X = torch.zeros(2, 1, 1, 1, 1)
SIGMA = torch.tensor([1.0, 2.0])
COND = conditioning([1.0, 2.0], [3.0])  # texts count 3 and 3


def guided(denoiser, **arguments) -> list[float]:
    return (classifier_free_guidance(denoiser, COND, **arguments)(X, SIGMA).flatten() + 0.08).tolist()


def test_uncond_plus_scale_times_the_difference():
    # cond is (3, 6), uncond (0, 0)
    assert guided(LinearDenoiser(), scale=2.5) == pytest.approx([7.5, 15.0])
    assert guided(LinearDenoiser(), scale=0.0) == pytest.approx([0.0, 0.0])


def test_both_halves_share_one_call():
    denoiser = LinearDenoiser()
    guided(denoiser, scale=3.0)
    assert denoiser.batch_sizes == [4]


def test_scale_1_asks_for_the_conditional_half_alone():
    denoiser = LinearDenoiser()
    assert guided(denoiser, scale=1.0) == pytest.approx([3.0, 6.0])
    assert denoiser.batch_sizes == [2]


def test_negative_text_replaces_the_null_text():
    negative = conditioning([0.5, 0.25, 0.25], [2.0])  # of another length: 1 and 2
    # 1 * sigma + 2 (3 - 1) sigma = 5; (2 + 2 (3 - 2)) sigma = 8
    assert guided(LinearDenoiser(), scale=2.0, negative=negative) == pytest.approx([5.0, 8.0])
    # Negative control: the prompt itself as negative cancels guidance.
    assert guided(LinearDenoiser(), scale=7.0, negative=COND) == pytest.approx([3.0, 6.0])


def test_conventions():
    assert guidance_scale(7.0) == 7.0
    assert guidance_scale(7.0, "nemo") == 8.0
    cond, uncond, g = torch.tensor(3.0), torch.tensor(-1.0), 1.5
    assert uncond + guidance_scale(g, "nemo") * (cond - uncond) == cond + g * (cond - uncond)
    with pytest.raises(UserError, match="'dfm' is unknown; choose one of standard, nemo"):
        guidance_scale(7.0, "dfm")
