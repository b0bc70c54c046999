"""Which part of a training sample is given."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megadit.models.diffusion.noise import sample_key
from megadit.models.networks.dit import DiT
from megadit.models.networks.initialize import initialize_
from megadit.models.shared.errors import UserError
from megadit.train.data.packs.conditioning import KINDS, draw, parse_kinds
from megadit.train.data.packs.packed_batch import PackedBatch, PackFormat
from megadit.train.data.packs.training_sample import Frames, TrainingSample
from megadit.train.objectives.denoise import token_noise
from megadit.train.objectives.losses import edm_loss
from megadit.train.recipes import load_recipe

MODEL = replace(load_recipe("digits_tiny").model, in_channels=4, sigma_data=1.0, conditioning_sigma=0.02)
ALL = (("first_frame", 0.2), ("last_frame", 0.2), ("keyframes", 0.1), ("prefix", 0.1), ("inpaint", 0.2), ("edit", 1.0))


def sample(index=0, *, frames=3, is_edit=False, has_frames=True) -> TrainingSample:
    generator = torch.Generator().manual_seed(index)
    latent = torch.randn(4, frames, 4, 4, generator=generator)
    return TrainingSample(
        sample_id=f"sample-{index}",
        occurrence=0,
        latent_CTHW=latent,
        text_LE=torch.randn(3, MODEL.crossattn_emb_size, generator=generator),
        fps=8.0 if frames > 1 else 0.0,
        reference_CTHW=torch.randn(4, frames, 4, 4, generator=generator) if is_edit else None,
        frames=Frames(torch.randn(4, 2, 4, 4, generator=generator), (1.0, 2.0)) if has_frames else None,
    )


def packed(samples, given=ALL, dropout=(0.05, 0.05, 0.05), text_dropout=0.1, seq_length=512) -> PackedBatch:
    return PackFormat(
        model=MODEL,
        seq_length=seq_length,
        text_seq_length=128,
        seed=3,
        text_dropout=text_dropout,
        conditioning=given,
        conditioning_dropout=dropout,
    ).pack(samples)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draws", [(0.0,) * 7, (0.999,) * 7, (0.3, 0.9, 0.1, 0.6, 0.4, 0.8, 0.2)])
def test_every_use_gives_a_part_and_wants_another(kind, draws):
    clip = sample(is_edit=kind == "edit")
    part = KINDS[kind](clip, draws, MODEL)
    if part is None:  # a box that is all of the video leaves nothing to give
        assert kind == "inpaint" and draws[0] > 0.99
        return
    assert part.is_clean_THW.any() and not part.is_clean_THW[:3].all()
    extra = len(part.is_clean_THW) - 3
    assert extra == len(part.extra_times) and part.is_clean_THW[3:].all()
    assert torch.equal(part.latents_BCTHW[0, :, :3], clip.latent_CTHW)
    segment = part.segment(MODEL, 2)
    assert segment.num_tokens == (3 + extra) * 16 and len(segment.times) == (3 + extra if extra else 0)


def test_an_image_has_no_frames_to_give():
    image = sample(frames=1, has_frames=False)
    for kind in KINDS.keys() - {"inpaint"}:
        assert KINDS[kind](image, (0.5,) * 7, MODEL) is None, kind
    assert KINDS["inpaint"](image, (0.5,) * 7, MODEL) is not None


def test_either_keyframe_is_as_likely_as_the_other():
    counts = Counter()
    for index in range(2000):
        drawn = draw(sample(), sample_key(1, f"{index}", 0), (("keyframes", 1.0),), (0.0, 0.0, 0.0), MODEL)
        counts[drawn.clean.extra_times] += 1
    # both in a quarter; one alone in a quarter, and in half of another in which neither was drawn
    for times, share in {(1.0, 2.0): 1 / 4, (1.0,): 3 / 8, (2.0,): 3 / 8}.items():
        assert counts[times] / 2000 == pytest.approx(share, abs=0.035), times


def test_shares_are_those_asked_for():
    counts = Counter()
    for index in range(4000):
        drawn = draw(sample(), sample_key(1, f"{index}", 0), ALL[:3], (0.05, 0.1, 0.15), MODEL)
        counts["none" if drawn.keeps_text is None else f"{drawn.clean is not None} {drawn.keeps_text}"] += 1
    # two thirds of the samples have a use... of which 70 % lose nothing; deviations of 4,000 draws are below .008
    expected = {"none": 0.5, "True True": 0.35, "False True": 0.025, "True False": 0.05, "False False": 0.075}
    for name, share in expected.items():
        assert counts[name] / 4000 == pytest.approx(share, abs=0.03), (name, counts)


def test_a_clip_to_edit_is_for_edits_alone():
    uses = {draw(sample(is_edit=True), index, ALL, (0, 0, 0), MODEL).clean.extra_times for index in range(50)}
    assert uses == {(0.0, 1.0, 2.0)}
    none = draw(sample(is_edit=True), 5, ALL[:-1], (0, 0, 0), MODEL)
    assert none.clean is None and none.keeps_text is None


def test_a_caption_for_what_is_given_stands_where_something_is():
    counts = Counter()
    for index in range(2000):
        one = replace(sample(), image_text_LE=torch.zeros(1, MODEL.crossattn_emb_size))
        drawn = draw(one, sample_key(2, f"{index}", 0), ALL[:2], (0.1, 0.0, 0.0), MODEL)
        counts[drawn.clean is not None, len(drawn.text_LE)] += 1
    given = counts[True, 1] + counts[True, 3]
    assert counts[False, 1] == 0 and counts[True, 1] / given == pytest.approx(0.75, abs=0.06)


def test_without_uses_packs_are_those_of_before():
    samples = [sample(index) for index in range(4)]
    plain, able = packed(samples, given=()), packed(samples, given=(("first_frame", 1e-9),))
    assert plain.layout.segments == able.layout.segments and not able.layout.has_conditioning
    assert torch.equal(plain.tokens_S1P, able.tokens_S1P) and torch.equal(plain.text_L1E, able.text_L1E)


def test_a_pack_draws_for_each_sample_alone():
    samples = [sample(index, is_edit=index % 3 == 2) for index in range(6)]
    together = packed(samples).layout.segments
    alone = [packed([one]).layout.segments[0] for one in samples]
    assert together[:6] == tuple(alone)
    lengths = [PackFormat(model=MODEL, seq_length=512, text_seq_length=64, seed=3, text_dropout=0.1, conditioning=ALL,
               conditioning_dropout=(0.05, 0.05, 0.05)).lengths(one)[0] for one in samples]  # fmt: skip
    assert lengths == [segment.num_tokens for segment in together[:6]]


@torch.no_grad()
def test_what_is_given_bears_no_loss_and_is_seen_clean():
    dit = initialize_(DiT(MODEL), seed=0)
    for parameter in dit.parameters():
        if parameter.norm() == 0:
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    samples = [sample(index, is_edit=index == 1) for index in range(3)]
    batch = packed(samples, given=(("first_frame", 1.0), ("edit", 1.0)), dropout=(0, 0, 0))
    sigma_G = torch.full((batch.layout.num_segments,), 1.5)
    noise = token_noise(batch)
    is_wanted = batch.layout.on("cpu").is_target_S
    assert batch.num_tokens == int(is_wanted.sum()) == (2 + 3 + 2) * 16

    usual = edm_loss(dit, batch, sigma_G, noise)
    other_noise = torch.where(is_wanted[:, None, None], noise, 7.0)
    assert edm_loss(dit, batch, sigma_G, other_noise) == usual, "no noise is added to it"
    noisy = torch.where(is_wanted[:, None, None], 7.0, noise)
    assert edm_loss(dit, batch, sigma_G, noisy) != usual
    # negative control: with the loss on all tokens, as if nothing were given, the sums differ
    plain = replace(batch, layout=replace(batch.layout, segments=tuple(
        replace(segment, clean=()) for segment in batch.layout.segments)))  # fmt: skip
    assert abs(edm_loss(dit, plain, sigma_G, noise).weighted - usual.weighted) > 0.05 * usual.weighted


@pytest.mark.parametrize(
    ("uses", "message"),
    [
        (["first_fame:0.2"], "did you mean 'first_frame'"),
        (["first_frame"], "needs a share above 0"),
        (["first_frame:1.5"], "needs a share above 0 and at most 1"),
        (["first_frame:0.7", "prefix:0.6"], "add up to 1.3"),
    ],
)
def test_mistakes(uses, message):
    with pytest.raises(UserError, match=message):
        parse_kinds(uses)
