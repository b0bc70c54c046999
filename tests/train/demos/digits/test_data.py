"""The handwritten digits: what training sees and does not, captions that tell the truth, motion at subpixel steps."""

from collections import Counter
from itertools import product

import pytest
import torch

from megadit.train.demos.digits import data as digits
from megadit.train.demos.digits.classifier import centres_of_mass, strokes
from megadit.train.demos.digits.data import COLOURS, DIGITS, DIRECTIONS, FRAME_SIZE, SPEEDS, Attributes


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_attribute_each() -> list[Attributes]:
    return [
        Attributes(digit=n % 10, colour=list(COLOURS)[n % 6], direction=direction, speed=speed)
        for n, (direction, speed) in enumerate(product(DIRECTIONS, SPEEDS))
    ]


def test_every_handwritten_digit_is_in_exactly_one_split():
    from sklearn.datasets import load_digits

    train, heldout = digits.load_glyphs("train"), digits.load_glyphs("heldout")
    split = Counter(map(bytes, (torch.cat([train.ink_BIJ, heldout.ink_BIJ]) * 16).byte().numpy()))
    assert split == Counter(map(bytes, load_digits().images.astype("uint8")))
    for digit in range(10):
        num_train, num_heldout = int((train.digit_B == digit).sum()), int((heldout.digit_B == digit).sum())
        assert num_heldout == (num_train + num_heldout) // 5


def test_unseen_combinations_are_balanced():
    unseen = digits.unseen_combinations()
    assert len({a.combination for a in unseen}) == 24
    assert {(a.colour, a.direction) for a in unseen} == set(product(COLOURS, DIRECTIONS))
    assert sorted(Counter(a.digit for a in unseen).values()) == [2] * 6 + [3] * 4
    assert len(digits.seen_combinations()) == 240 - 24


def test_training_never_draws_an_unseen_combination():
    drawn = Counter(a.combination for a in digits.random_attributes(20_000, images=False, generator=generator()))
    assert not drawn.keys() & {a.combination for a in digits.unseen_combinations()}
    assert len(drawn) == 216 and min(drawn.values()) > 40


def test_images_show_every_digit_in_every_colour():
    drawn = {a.combination for a in digits.random_attributes(2000, images=True, generator=generator())}
    assert drawn == set(product(range(10), COLOURS, [None]))


def test_heldout_captions_are_never_trained_on():
    combinations = digits.seen_combinations() + digits.unseen_combinations()
    everything = [digits.with_speed(a, speed) for a in combinations for speed in SPEEDS]
    trained = {caption for a in everything for caption in digits.captions(a, "train")}
    heldout = {caption for a in everything for caption in digits.captions(a, "heldout")}
    assert not trained & heldout
    assert 0.09 < len(heldout) / len(trained | heldout) < 0.16
    assert all(digits.captions(a, "heldout") and len(digits.captions(a, "train")) >= 20 for a in everything)


@pytest.mark.parametrize("attributes", one_attribute_each())
def test_captions_tell_digit_colour_direction_and_nothing_else(attributes):
    others = {
        "digit": set(DIGITS) | set("0123456789"),
        "colour": set(COLOURS),
        "direction": {"left", "right", "up", "upwards", "down", "downwards"},
        "pace": {"slowly", "quickly"},
    }
    for caption in digits.captions(attributes, "train"):
        words = set(caption.split())
        assert words & others["digit"] <= {DIGITS[attributes.digit], str(attributes.digit)}
        assert words & others["colour"] == {attributes.colour}
        assert words & others["direction"] <= {attributes.direction, f"{attributes.direction}wards"}
        assert words & others["pace"] <= {digits.PACES[attributes.speed]}
        assert words & others["digit"] and words & others["direction"]


def test_articles():
    eight = Attributes(digit=8, colour="red")
    assert "an eight in red" in digits.captions(eight, "train") + digits.captions(eight, "heldout")
    assert "a red eight" in digits.captions(eight, "train") + digits.captions(eight, "heldout")


@pytest.mark.parametrize("attributes", one_attribute_each())
def test_clips_move_as_told(attributes):
    clips = digits.draw_clips([attributes] * 8, "train", generator())
    assert clips.shape == (8, 3, digits.NUM_FRAMES, FRAME_SIZE, FRAME_SIZE)
    stroke_BTHW = strokes(clips)
    travelled_B2 = centres_of_mass(stroke_BTHW[:, -1]) - centres_of_mass(stroke_BTHW[:, 0])
    expected = torch.tensor(DIRECTIONS[attributes.direction]) * SPEEDS[attributes.speed] * (digits.NUM_FRAMES - 1)
    # A fast digit may leave the frame by a pixel, which takes a little of its ink.
    torch.testing.assert_close(travelled_B2, expected.expand(8, 2), atol=0.5, rtol=0)


def test_drawing_moves_with_the_path():
    attributes = [Attributes(digit=3, colour="white")]
    ink = digits.load_glyphs("train").ink_BIJ[500:501]
    here, there = (digits.render_clips(ink, attributes, torch.tensor([[0.25, x]]), 1) for x in (-0.4, 1.6))
    torch.testing.assert_close(here[..., 4:-6], there[..., 6:-4], atol=1e-5, rtol=0)
    assert not torch.allclose(here[..., 4:-6], there[..., 5:-5], atol=0.1)


def test_pixels_are_the_colour_on_black():
    full = torch.ones(1, 8, 8)
    clip = digits.render_clips(full, [Attributes(digit=0, colour="red")], torch.zeros(1, 2), 1)
    assert clip.min() >= -1 and clip.max() <= 1
    torch.testing.assert_close((clip[0, :, 0, 16, 16] + 1) / 2, torch.tensor(COLOURS["red"]))
    torch.testing.assert_close(clip[0, :, 0, 0, 0], -torch.ones(3))
    torch.testing.assert_close(clip, clip.flip(-1), atol=1e-5, rtol=0)  # a glyph that is symmetric lies in the middle


def test_the_seed_decides():
    def draw(seed: int) -> tuple[torch.Tensor, list[str]]:
        source = generator(seed)
        attributes = digits.random_attributes(20, images=False, generator=source)
        return digits.draw_clips(attributes, "train", source), digits.random_captions(attributes, "train", source)

    (first, said_first), (again, said_again), (other, said_other) = draw(1), draw(1), draw(2)
    assert torch.equal(first, again) and said_first == said_again
    assert not torch.equal(first, other) and said_first != said_other


def test_captions_are_read_back():
    everything = [*digits.seen_combinations(), *digits.unseen_combinations(), Attributes(digit=8, colour="white")]
    for attributes in everything:
        for caption in (*digits.captions(attributes, "train"), *digits.captions(attributes, "heldout")):
            assert digits.attributes_in(caption) == attributes, caption
    assert digits.attributes_in("a red dog moving left") is None and digits.attributes_in("the number seven") is None
