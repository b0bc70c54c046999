"""Guidance around a denoiser that is linear in its text, so that every result is known in closed form."""

import pytest
import torch

from megadit.infer.sampling.guidance import (
    Branch,
    guidance_scale,
    guided,
    guided_by_settings,
    in_one_batch,
    in_turn,
)
from megadit.infer.sampling.resolve import num_function_evaluations
from megadit.infer.sampling.samplers import euler
from megadit.infer.sampling.schedules import settings_sigmas
from megadit.models.configs.config import DiTConfig
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.networks.conditioning import Conditioning
from megadit.models.shared.errors import UserError


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


def classifier_free(denoiser, *, scale, negative=None, **options):
    base = COND.null() if negative is None else negative
    return guided([Branch(denoiser, COND)], [scale], Branch(denoiser, base), **options)


def answer(denoiser, **arguments) -> list[float]:
    return (classifier_free(denoiser, **arguments)(X, SIGMA).flatten() + 0.08).tolist()


def test_uncond_plus_scale_times_the_difference():
    # cond is (3, 6), uncond (0, 0)
    assert answer(LinearDenoiser(), scale=2.5) == pytest.approx([7.5, 15.0])
    assert answer(LinearDenoiser(), scale=0.0) == pytest.approx([0.0, 0.0])


def test_both_halves_share_one_call():
    denoiser = LinearDenoiser()
    answer(denoiser, scale=3.0)
    assert denoiser.batch_sizes == [4]


def test_scale_1_asks_for_the_conditional_half_alone():
    denoiser = LinearDenoiser()
    assert answer(denoiser, scale=1.0) == pytest.approx([3.0, 6.0])
    assert denoiser.batch_sizes == [2]


@pytest.mark.parametrize(("guidance", "second"), [(1.0, 0.0), (3.0, 0.0), (1.0, 2.0), (3.0, 2.0), (0.5, 0.5)])
def test_as_many_evaluations_are_counted_as_there_are(guidance, second):
    sizes = {"num_frames": 1, "height": 8, "width": 8, "fps": 0.0}
    both = {"second_prompt": "b", "second_guidance": second} if second else {}
    settings = SamplingSettings(sampler="euler", num_steps=3, guidance=guidance, **sizes, **both)
    denoiser = LinearDenoiser()
    denoise = guided_by_settings(settings, denoiser, lambda texts: COND, ["a", "b"], {})
    euler(denoise, X, settings_sigmas(settings))
    assert sum(denoiser.batch_sizes) == len(X) * num_function_evaluations(settings, DiTConfig())


def test_negative_text_replaces_the_null_text():
    negative = conditioning([0.5, 0.25, 0.25], [2.0])  # of another length: 1 and 2
    # 1 * sigma + 2 (3 - 1) sigma = 5; (2 + 2 (3 - 2)) sigma = 8
    assert answer(LinearDenoiser(), scale=2.0, negative=negative) == pytest.approx([5.0, 8.0])
    # Negative control: the prompt itself as negative cancels guidance.
    assert answer(LinearDenoiser(), scale=7.0, negative=COND) == pytest.approx([3.0, 6.0])


def test_conventions():
    assert guidance_scale(7.0) == 7.0
    assert guidance_scale(7.0, "nemo") == 8.0
    cond, uncond, g = torch.tensor(3.0), torch.tensor(-1.0), 1.5
    assert uncond + guidance_scale(g, "nemo") * (cond - uncond) == cond + g * (cond - uncond)
    with pytest.raises(UserError, match="'dfm' is unknown; choose one of standard, nemo"):
        guidance_scale(7.0, "dfm")


# ------------------------------------------------------------------------------------------------ other guidance


NEGATIVE = conditioning([0.5, 0.5], [2.0])  # 1 and 2
SECOND = conditioning([5.0], [4.0])


def combined(conditions, scales, base, **options) -> list[float]:
    return (guided(conditions, scales, base, **options)(X, SIGMA).flatten() + 0.08).tolist()


def test_two_conditions_with_two_scales():
    denoiser = LinearDenoiser()
    branches = [Branch(denoiser, COND), Branch(denoiser, SECOND)]
    # 1 + 2 (3 - 1) + 0.5 (5 - 1) = 7;  (2 + 2 (3 - 2) + 0.5 (4 - 2)) * 2 = 10
    assert combined(branches, [2.0, 0.5], Branch(denoiser, NEGATIVE)) == pytest.approx([7.0, 10.0])
    assert denoiser.batch_sizes == [6]
    # Scales that add up to 1 need no base: 0.75 * 3 + 0.25 * 5 = 3.5; (0.75 * 3 + 0.25 * 4) * 2 = 6.5
    assert combined(branches, [0.75, 0.25], Branch(denoiser, NEGATIVE)) == pytest.approx([3.5, 6.5])
    assert denoiser.batch_sizes == [6, 4]


def test_autoguidance_asks_the_weaker_network_for_the_same_prompt():
    strong, weak = LinearDenoiser(), LinearDenoiser()

    def weaker(x, sigma_B, conditioning):
        return 0.5 * weak(x, sigma_B, conditioning) - 0.04

    answers = combined([Branch(strong, COND)], [3.0], Branch(weaker, COND))
    # half is (1.5, 3), minus half of fps / 100 and 0.04: the shift of 0.08 stands. 1.5 + 3 (3 - 1.5) = 6
    assert answers == pytest.approx([6.0, 12.0])
    assert strong.batch_sizes == weak.batch_sizes == [2]


def test_guidance_acts_within_its_interval():
    denoiser = LinearDenoiser()
    denoise = classifier_free(denoiser, scale=2.0, interval=(0.5, 1.5))

    def asked_at(sigma):
        return ((denoise(X, torch.full((2,), sigma)).flatten() + 0.08) / sigma).tolist()

    assert asked_at(1.0) == asked_at(0.5) == pytest.approx([6.0, 6.0])
    assert denoiser.batch_sizes == [4, 4]
    # Outside, the condition alone is asked for, and half as much computed.
    assert asked_at(0.4) == asked_at(2.0) == pytest.approx([3.0, 3.0])
    assert denoiser.batch_sizes == [4, 4, 2, 2]


class TwoFaced:
    """Answers texts with 0 mean and a deviation of their sum."""

    pattern = torch.tensor([-1.0, 1.0]).reshape(1, 1, 1, 1, 2) / 2**0.5

    def __call__(self, x, sigma_B, conditioning):
        return conditioning.text_BLE.sum((1, 2)).reshape(-1, 1, 1, 1, 1) * self.pattern


@pytest.mark.parametrize(("rescale", "deviation"), [(0.0, 7.0), (1.0, 3.0), (0.5, 5.0)])
def test_rescaling_gives_the_deviation_back(rescale, deviation):
    cond, base = conditioning([3.0]), conditioning([1.0])
    network = TwoFaced()
    denoise = guided([Branch(network, cond)], [3.0], Branch(network, base), rescale=rescale)
    assert denoise(torch.zeros(1, 1, 1, 1, 2), torch.ones(1)).std().item() == pytest.approx(deviation)


def test_halves_in_one_batch_and_in_turn_are_the_same():
    one, other = LinearDenoiser(), LinearDenoiser()
    branches = [Branch(one, COND), Branch(other, COND), Branch(one, NEGATIVE)]
    together, apart = in_one_batch(branches)(X, SIGMA), in_turn(branches)(X, SIGMA)
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
    assert one.batch_sizes == [4, 2, 2] and other.batch_sizes == [2, 2]
