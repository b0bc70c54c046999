"""Generations that start from a given video."""

import numpy as np
import pytest
import torch

from megadit.infer.conditions import GivenVideo, Start
from megadit.infer.samplers import SAMPLERS
from megadit.models.shared.errors import UserError


def clip(frames=5, height=16, width=24, seed=0):
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 255, (1, height // 4, width // 4, 3), dtype=np.uint8)
    return coarse.repeat(frames, 0).repeat(4, 1).repeat(4, 2)


def distance(a, b):
    return np.abs(a.astype(float) - b).mean()


def test_strength_decides_how_much_is_made_again(pipeline):
    given = clip()
    calls = {}

    def video(strength):
        (result,) = pipeline.generate(["a red seven"], num_steps=10, given=GivenVideo(frames=given, strength=strength))
        calls[strength] = result.num_denoiser_calls
        return result.video

    distances = [distance(video(strength), given) for strength in (0.1, 0.5, 1.0)]
    assert calls == {0.1: 1, 0.5: 5, 1.0: 10}
    assert distances[0] < distances[1] < distances[2]
    assert distances[0] < 5 < distances[2]


def test_video_to_video_takes_other_sizes_and_cuts_the_tail(pipeline):
    given = GivenVideo(frames=clip(frames=9, height=32, width=48), strength=0.1)
    (result,) = pipeline.generate(["a"], num_steps=10, given=given, num_frames=7)
    assert result.video.shape == (7, 16, 24, 3)
    assert distance(result.video[:, ::4, ::4], clip(9, 32, 48)[:7, ::8, ::8]) < 40


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_continuation_keeps_the_given_frames(pipeline, sampler):
    given = clip(frames=7, seed=3)
    results = pipeline.generate(
        ["a red seven", "a blue two"],
        seeds=[1, 2],
        sampler=sampler,
        num_frames=13,
        given=GivenVideo(frames=given, keep_frames=6),
    )
    for result in results:
        assert result.video.shape[0] == 13
        # 6 frames hold 5 that the tokenizer can encode: the last ones. The tiny bundle's tokenizer is lossless.
        assert np.abs(result.video[:5].astype(int) - given[2:]).max() <= 1
        assert distance(result.video[5:9], given[2:6]) > 5
    assert distance(results[0].video[5:], results[1].video[5:]) > 5


def test_continuation_of_an_image(pipeline):
    image = clip(frames=1, seed=4)
    (result,) = pipeline.generate(["a"], given=GivenVideo(frames=image, keep_frames=1))
    assert np.abs(result.video[0].astype(int) - image[0]).max() <= 1
    # What is kept decides what follows: the network saw it.
    (other,) = pipeline.generate(["a"], given=GivenVideo(frames=clip(1, seed=5), keep_frames=1))
    assert distance(result.video[1:], other.video[1:]) > 0.1


def test_kept_latents_stay_on_the_line_that_training_noise_draws():
    known = torch.full((1, 2, 1, 2, 2), 0.7)
    start, noise = Start(known, num_kept=1), torch.randn(3, 2, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    seen = []

    def denoise(x, sigma_B):
        sigma = sigma_B.reshape(-1, 1, 1, 1, 1)
        seen.append((x[:, :, :1] - 0.7 - sigma * noise[:, :, :1]).abs().max().item() / sigma[0].item())
        return 0.5 * x

    sigmas = torch.tensor([8.0, 3.0, 1.0, 0.2, 0.0], dtype=torch.float64)
    for sampler in SAMPLERS.values():
        x = sampler(start.replaces(denoise), start.initial_state(8.0, noise), sigmas)
        torch.testing.assert_close(x[:, :, :1], known.double().expand(3, -1, -1, -1, -1))
    assert max(seen) < 1e-5


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ({"strength": 0.0}, {}, "strength=0.0 must be greater than 0"),
        ({"strength": 1.5}, {}, "strength=1.5"),
        ({}, {}, "say what to do"),
        ({"strength": 0.5, "keep_frames": 2}, {}, "say what to do"),
        ({"keep_frames": 0}, {}, "keep_frames=0 must be at least 1"),
        ({"keep_frames": 5}, {}, "leaves nothing to make of 5 frames"),
        ({"strength": 0.5}, {"num_frames": 9}, "has 5 frames, 9 are wanted"),
        ({"strength": 0.5, "frames": np.zeros((5, 16, 24, 3))}, {}, "must be uint8"),
    ],
)
def test_mistakes(pipeline, given, settings, message):
    with pytest.raises(UserError, match=message):
        pipeline.generate(["a"], given=GivenVideo(**({"frames": clip()} | given)), **settings)
