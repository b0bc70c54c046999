"""Generations that start from a given video."""

import numpy as np
import pytest
import torch

from megadit.infer.conditioning.encode import EncodedConditioning
from megadit.infer.conditioning.items import ConditioningItem
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.sampling.samplers import SAMPLERS
from megadit.models.configs.config import DiTConfig
from megadit.models.networks.conditioning import CleanLatents
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
        (result,) = pipeline(
            ["a red seven"], num_steps=10, conditioning=ConditioningItem(frames=given, strength=strength)
        )
        calls[strength] = result.num_denoiser_calls
        return result.video

    distances = [distance(video(strength), given) for strength in (0.1, 0.5, 1.0)]
    assert calls == {0.1: 1, 0.5: 5, 1.0: 10}
    assert distances[0] < distances[1] < distances[2]
    assert distances[0] < 5 < distances[2]


def test_video_to_video_takes_other_sizes_and_cuts_the_tail(pipeline):
    given = ConditioningItem(frames=clip(frames=9, height=32, width=48), strength=0.1)
    (result,) = pipeline(["a"], num_steps=10, conditioning=given, num_frames=7)
    assert result.video.shape == (7, 16, 24, 3)
    assert distance(result.video[:, ::4, ::4], clip(9, 32, 48)[:7, ::8, ::8]) < 40


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_continuation_keeps_the_given_frames(pipeline, sampler):
    given = clip(frames=7, seed=3)
    results = pipeline(
        ["a red seven", "a blue two"],
        seeds=[1, 2],
        sampler=sampler,
        num_frames=13,
        conditioning=ConditioningItem(frames=given, keep_frames=6),
    )
    for result in results:
        assert result.video.shape[0] == 13
        # 6 frames hold 5 that the tokenizer can encode: the last ones. The tiny bundle's tokenizer is lossless.
        assert np.abs(result.video[:5].astype(int) - given[2:]).max() <= 1
        assert distance(result.video[5:9], given[2:6]) > 5
    assert distance(results[0].video[5:], results[1].video[5:]) > 5


def test_continuation_of_an_image(pipeline):
    image = clip(frames=1, seed=4)
    (result,) = pipeline(["a"], conditioning=ConditioningItem(frames=image, keep_frames=1))
    assert np.abs(result.video[0].astype(int) - image[0]).max() <= 1
    # What is kept decides what follows: the network saw it.
    (other,) = pipeline(["a"], conditioning=ConditioningItem(frames=clip(1, seed=5), keep_frames=1))
    assert distance(result.video[1:], other.video[1:]) > 0.1


def test_kept_latents_stay_on_the_line_that_training_noise_draws():
    is_read = torch.zeros(4, 2, 2, dtype=torch.bool)
    is_read[:1] = True
    known = torch.full((1, 2, 4, 2, 2), 0.7) * is_read
    start, noise = (
        EncodedConditioning(known, is_read),
        torch.randn(3, 2, 4, 2, 2, generator=torch.Generator().manual_seed(0)),
    )
    seen = []

    def denoise(x, sigma_B):
        sigma = sigma_B.reshape(-1, 1, 1, 1, 1)
        seen.append((x[:, :, :1] - 0.7 - sigma * noise[:, :, :1]).abs().max().item() / sigma[0].item())
        return 0.5 * x

    sigmas = torch.tensor([8.0, 3.0, 1.0, 0.2, 0.0], dtype=torch.float64)
    for sampler in SAMPLERS.values():
        x = sampler(start.replaces(denoise), start.initial_state(8.0, noise), sigmas)
        torch.testing.assert_close(x[:, :, :1], known[:, :, :1].double().expand(3, -1, -1, -1, -1))
    assert max(seen) < 1e-5


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ({"strength": 0.0}, {}, "strength=0.0 must be greater than 0"),
        ({"strength": 1.5}, {}, "strength=1.5"),
        ({}, {}, "needs one of strength and keep_frames"),
        ({"strength": 0.5, "keep_frames": 2}, {}, "needs one of strength"),
        ({"keep_frames": 0}, {}, "keep_frames=0 must be at least 1"),
        ({"keep_frames": 5}, {}, "leaves none of 5 frames to generate"),
        ({"strength": 0.5}, {"num_frames": 9}, "has 5 frames, 9 are needed: set num_frames to at most 5"),
        ({"strength": 0.5, "frames": np.zeros((5, 16, 24, 3))}, {}, "must be uint8"),
    ],
)
def test_mistakes(pipeline, given, settings, message):
    with pytest.raises(UserError, match=message):
        pipeline(["a"], conditioning=ConditioningItem(**({"frames": clip()} | given)), **settings)


# ------------------------------------------------------------------------------ networks that were trained for it


def video(pipeline, *given, prompts=("a red seven",), seeds=0, **settings):
    settings = {"num_frames": 13} | settings
    return [result.video for result in pipeline(list(prompts), seeds=seeds, conditioning=given or None, **settings)]


SOURCE = clip(frames=13, seed=7)
MASK = np.zeros((1, 16, 24), dtype=bool)
MASK[:, :, 8:] = True
USED = {
    "first_frame": (ConditioningItem(frames=SOURCE[:1], kind="first_frame"), np.s_[:1]),
    "prefix": (ConditioningItem(frames=SOURCE[:5], kind="prefix"), np.s_[:5]),
    "suffix": (ConditioningItem(frames=SOURCE[-8:], kind="suffix"), np.s_[-8:]),
    "inpaint": (ConditioningItem(frames=SOURCE, kind="inpaint", mask=MASK), np.s_[:, :, :8]),
    "last_frame": (ConditioningItem(frames=SOURCE[-1:], kind="last_frame"), None),
    "keyframe": (ConditioningItem(frames=SOURCE[6:7], kind="keyframe", frame=6), None),
    "edit": (ConditioningItem(frames=SOURCE, kind="edit"), None),
}
"""Use -> what is given, and where it stays in the video; None: it is only seen."""


@pytest.mark.parametrize("kind", USED)
def test_what_is_given_is_seen_and_stays_where_it_is(able, kind):
    given, place = USED[kind]
    (free,), (made,) = video(able), video(able, given)
    assert made.shape == free.shape == (13, 16, 24, 3)
    if place is not None:
        assert np.abs(made[place].astype(int) - SOURCE[place]).max() <= 1, "the tokenizer is lossless"
    changes = {"frames": 255 - given.frames, "kind": kind, "frame": given.frame, "mask": given.mask}
    (other,) = video(able, ConditioningItem(**changes))
    rest = np.ones(made.shape, dtype=bool)
    if place is not None:
        rest[place] = False
    assert distance(made[rest], free[rest]) > 0.1 and distance(made[rest], other[rest]) > 0.1, "it decides the rest"


def test_a_mask_is_seen_in_whole_tokens():
    """What is known of other tokens is held, but not seen."""
    latents, is_fixed_THW = torch.randn(1, 4, 1, 2, 6), torch.zeros(1, 2, 6, dtype=torch.bool)
    is_fixed_THW[..., :3] = True
    encoded = EncodedConditioning(latents, is_fixed_THW, CleanLatents(latents, is_fixed_THW))
    config = DiTConfig(in_channels=4, patch_spatial=2, conditioning_sigma=0.02)
    seen = encoded.seen(config, torch.tensor([1]))["clean"]
    assert seen.is_clean_THW[0].tolist() == [[True] * 2 + [False] * 4] * 2


@pytest.mark.parametrize("count", [7, 8, 10])
def test_an_end_is_the_last_frame_shown(able, count):
    """Of 12 frames 13 are decoded, in latents of four: the end is not what is cut."""
    (made,) = video(able, ConditioningItem(frames=SOURCE[:count], kind="suffix"), num_frames=12)
    assert len(made) == 12 and np.abs(made[-7:].astype(int) - SOURCE[:7]).max() <= 1
    with pytest.raises(UserError, match="at least 3 frames, got 2"):
        video(able, ConditioningItem(frames=SOURCE, kind="suffix", keep_frames=2), num_frames=12)


@pytest.mark.parametrize("kind", ["first_frame", "prefix", "suffix", "inpaint"])
def test_a_network_that_was_not_trained_is_held_to_it(pipeline, able, kind):
    """The same weights: what is known is put back while sampling, which gives another video than seeing it clean."""
    given, place = USED[kind]
    (held,), (seen,) = video(pipeline, given), video(able, given)
    assert np.abs(held[place].astype(int) - SOURCE[place]).max() <= 1
    assert distance(held, seen) > 0.1


@pytest.mark.parametrize("kind", ["last_frame", "keyframe", "edit"])
def test_what_only_training_teaches_is_refused_without(pipeline, kind):
    with pytest.raises(UserError, match=rf"has no {kind}s? conditioning \(supported: none"):
        video(pipeline, USED[kind][0])


def test_each_video_may_be_given_something_else(able):
    """Batches hold those of which the same places are given; each is as if made alone."""
    media = [USED["first_frame"][0], (USED["first_frame"][0], USED["last_frame"][0]), None, USED["edit"][0]]
    media.append(ConditioningItem(frames=255 - SOURCE[:1], kind="first_frame"))
    prompts, seeds = [f"a {number}" for number in range(5)], [3, 1, 4, 1, 5]
    together = able(prompts, seeds=seeds, conditioning=media, num_frames=13)
    for prompt, seed, given, result in zip(prompts, seeds, media, together, strict=True):
        (alone,) = able([prompt], seeds=seed, conditioning=given, num_frames=13)
        torch.testing.assert_close(alone.latents_CTHW, result.latents_CTHW, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="2 conditioning inputs for 3 prompts"):
        able(["a", "b", "c"], conditioning=[None, None])
    with pytest.raises(UserError, match="the same strength"):
        able(["a", "b"], conditioning=[ConditioningItem(frames=SOURCE, strength=0.5), None], num_frames=13)


def test_two_scales_lead_by_text_and_by_what_is_given(able):
    """D = D(0,0) + s_image (D(i,0) - D(0,0)) + s_text (D(i,t) - D(i,0)), at every call."""
    asked = {}

    class Noting:
        device = able.device

        def __call__(self, x, sigma_B, conditioning):
            answer = able.denoiser(x, sigma_B, conditioning)
            for row, length in zip(answer, conditioning.text_length_B.tolist(), strict=True):
                asked[conditioning.clean is not None, length > 0] = row
            return answer

    noting = TextToVideo(
        denoiser=Noting(), tokenizer=able.tokenizer, text_encoder=able.text_encoder, config=able.config,
        defaults=able.defaults, conditionings=able.conditionings,
    )  # fmt: skip
    settings = {"num_steps": 1, "sampler": "euler", "eta": 0.0, "num_frames": 13}
    given = USED["edit"][0]
    (result,) = noting(["a red seven"], conditioning=given, guidance=3.0, image_guidance=1.7, **settings)
    none, clip_alone, both = asked[False, False], asked[True, False], asked[True, True]
    expected = none + 1.7 * (clip_alone - none) + 3.0 * (both - clip_alone)
    torch.testing.assert_close(result.latents_CTHW, expected, rtol=1e-4, atol=1e-4)
    (plain,) = able(["a red seven"], conditioning=given, guidance=3.0, **settings)
    torch.testing.assert_close(plain.latents_CTHW, clip_alone + 3.0 * (both - clip_alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "frist_frame"}, "did you mean 'first_frame'"),
        ({"kind": "keyframe"}, "frame goes with kind=keyframe"),
        ({"kind": "keyframe", "frame": 13}, "the video has the frames 0 to 12"),
        ({"kind": "inpaint"}, "mask goes with kind=inpaint"),
        ({"kind": "inpaint", "mask": np.zeros((1, 16, 24), bool)}, "is black everywhere"),
        ({"kind": "inpaint", "mask": np.ones((4, 16, 24), bool)}, "the mask has 4 frames, the video 13"),
        ({"kind": "inpaint", "mask": np.ones((16, 24))}, "a mask must be bool"),
        ({"kind": "suffix", "keep_frames": 3}, "at least 4 frames"),
        ({"kind": "prefix", "keep_frames": 13}, "leaves none of"),
        ({"kind": "edit", "frames": SOURCE[:5]}, "has 5 frames, 13 are needed"),
    ],
)
def test_more_mistakes(able, given, message):
    with pytest.raises(UserError, match=message):
        video(able, ConditioningItem(**{"frames": SOURCE} | given))
