"""The classifier: right about real clips, and not to be had by clips that show something else or nothing."""

import pytest
import torch

from megadit.train.demos.digits import classifier
from megadit.train.demos.digits import data as digits
from megadit.train.demos.digits.classifier import NONE
from megadit.train.demos.digits.data import COLOURS, DIRECTIONS


@pytest.fixture(scope="module")
def clips():
    generator = torch.Generator().manual_seed(0)
    attributes = digits.random_attributes(160, images=False, generator=generator)
    return attributes, digits.draw_clips(attributes, "heldout", generator)


def measured(video_BCTHW):
    """Verdicts of an untrained classifier: colour and direction take no training."""
    return classifier.classify(classifier.DigitReader().eval(), video_BCTHW)


def direction_indices(attributes):
    return torch.tensor([list(DIRECTIONS).index(a.direction) for a in attributes])


def colour_indices(attributes):
    return torch.tensor([list(COLOURS).index(a.colour) for a in attributes])


def test_colour_and_direction_of_real_clips(clips):
    attributes, video = clips
    verdicts = measured(video)
    assert (verdicts.colour_BT == colour_indices(attributes)[:, None]).all()
    assert (verdicts.direction_B == direction_indices(attributes)).all()


def test_played_backwards_a_clip_moves_the_other_way(clips):
    attributes, video = clips
    opposite = torch.tensor([1, 0, 3, 2])  # left, right, up, down
    assert (measured(video.flip(2)).direction_B == opposite[direction_indices(attributes)]).all()


def test_transposed_a_clip_moves_along_the_other_axis(clips):
    attributes, video = clips
    transposed = torch.tensor([2, 3, 0, 1])
    assert (measured(video.transpose(-1, -2)).direction_B == transposed[direction_indices(attributes)]).all()


def test_a_still_clip_goes_nowhere(clips):
    _, video = clips
    assert (measured(video[:, :, :1].expand(-1, -1, 9, -1, -1)).direction_B == NONE).all()
    assert (measured(video[:, :, :1]).direction_B == NONE).all()


def test_a_diagonal_clip_has_no_direction():
    attributes = [digits.Attributes(digit=1, colour="white")]
    ink = digits.load_glyphs("train").ink_BIJ[200:201]
    frames = [digits.render_clips(ink, attributes, torch.full((1, 2), 0.8 * t), 1) for t in range(-4, 5)]
    assert measured(torch.cat(frames, dim=2)).direction_B.item() == NONE


def test_colours_that_have_no_name(clips):
    _, video = clips
    cyan = video.amax(1, keepdim=True) * torch.tensor([0.0, 1.0, 1.0]).reshape(1, 3, 1, 1, 1)
    cyan[:, 0] = -1
    assert (measured(cyan[:8]).colour_BT == NONE).all()


def test_swapped_channels_change_the_colour(clips):
    attributes, video = clips
    reds = torch.tensor([a.colour == "red" for a in attributes])
    verdicts = measured(video[reds].flip(1))  # red and blue exchanged
    assert (verdicts.colour_BT != list(COLOURS).index("red")).all()


def test_nothing_is_seen_in_the_dark():
    verdicts = measured(torch.full((2, 3, 9, 32, 32), -0.9))
    assert (verdicts.digit_BT == NONE).all() and (verdicts.colour_BT == NONE).all()
    assert (verdicts.direction_B == NONE).all()


def test_crops_follow_the_ink(clips):
    _, video = clips
    stroke = classifier.strokes(video)[:, 4]
    shifted = torch.zeros_like(stroke)
    shifted[:, 2:, :-1] = stroke[:, :-2, 1:]
    inside = (stroke[:, -2:].amax((1, 2)) < 0.01) & (stroke[:, :, :1].amax((1, 2)) < 0.01)
    crops, crops_shifted = classifier.centred_crops(stroke[inside]), classifier.centred_crops(shifted[inside])
    assert inside.sum() > 20
    torch.testing.assert_close(crops, crops_shifted, atol=1e-3, rtol=0)


def test_training_is_kept_and_repeated_for_another_tokenizer(tmp_path, monkeypatch):
    calls = []

    def fake_training(round_trip):
        calls.append(round_trip)
        return classifier.DigitReader().eval()

    monkeypatch.setattr(classifier, "train_reader", fake_training)
    path = tmp_path / "classifier.safetensors"
    first = classifier.load_or_train_reader(path, torch.clone, "tokenizer-a")
    again = classifier.load_or_train_reader(path, torch.clone, "tokenizer-a")
    assert len(calls) == 1
    crop = torch.rand(3, classifier.CROP_SIZE, classifier.CROP_SIZE)
    assert torch.equal(first(crop), again(crop))
    classifier.load_or_train_reader(path, torch.clone, "tokenizer-b")
    assert len(calls) == 2


def test_a_training_is_reproducible():
    """Whatever was drawn before."""

    def train(seed, before):
        torch.manual_seed(before)
        return classifier.train_reader(torch.clone, seed=seed, num_clips=20, num_steps=3, show_progress=False)

    first, again, other = train(0, before=1), train(0, before=2), train(1, before=1)
    assert torch.equal(first.network[0].weight, again.network[0].weight)
    assert not torch.equal(first.network[0].weight, other.network[0].weight)


def test_a_short_training_learns(clips):
    attributes, video = clips
    reader = classifier.train_reader(torch.clone, num_clips=300, num_steps=80, show_progress=False)
    wanted = torch.tensor([a.digit for a in attributes])[:, None]
    right = (classifier.classify(reader, video).digit_BT == wanted).float().mean().item()
    assert right > 0.75  # guessing gives 0.1
    mirrored = (classifier.classify(reader, video.flip(-1)).digit_BT == wanted).float().mean().item()
    assert mirrored < right - 0.2  # it reads the shape, not the place or the colour


@pytest.mark.slow
def test_full_training_reads_heldout_handwriting():
    reader = classifier.train_reader(torch.clone, show_progress=False)
    glyphs = digits.load_glyphs("heldout")
    attributes = [
        digits.Attributes(digit=digit, colour="white", direction="down", speed="fast")
        for digit in glyphs.digit_B.tolist()
    ]
    video = digits.render_clips(glyphs.ink_BIJ, attributes, torch.zeros(len(attributes), 2), digits.NUM_FRAMES)
    right = classifier.classify(reader, video).digit_BT == glyphs.digit_B[:, None]
    assert right.float().mean() >= 0.985
