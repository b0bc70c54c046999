"""The classifier of scenes: right about real clips, and not to be had by clips that show something else or nothing."""

from dataclasses import replace

import pytest
import torch

from megadit.train.demos.shapes import data as shapes
from megadit.train.demos.shapes import score
from megadit.train.demos.shapes.classifier import classify
from megadit.train.demos.shapes.samples import SHAPES


def draw(num_things: int, count: int = 24):
    generator = torch.Generator().manual_seed(7)
    scenes = shapes.random_scenes(count, num_things, generator)
    return scenes, shapes.draw_scenes(scenes, generator)


@pytest.fixture(scope="module", params=[1, 2], ids=["one thing", "two"])
def clips(request):
    return draw(request.param)


def shares(clips, scenes=None, **changes):
    told, video = clips
    return score.score(video, [replace(each, **changes) for each in scenes or told])


def test_real_clips_show_what_they_are_drawn_of(clips):
    assert shares(clips)["all"] == 1.0


@pytest.mark.slow
def test_what_the_tokenizer_leaves_of_them_is_read():
    tokenizer = SHAPES.fit_tokenizer(0, 75)  # of a quarter of the scenes: it leaves no more
    for num_things, least in ((1, 0.9), (2, 0.85)):
        scenes, video = draw(num_things)
        assert score.score(tokenizer.decode(tokenizer.encode(video)).clamp(-1, 1), scenes)["all"] >= least


def test_backwards_every_motion_is_wrong(clips):
    told, video = clips
    moving = [row for row, each in enumerate(told) if each.action != "recolour"]
    found = score.score(video[moving].flip(2), [told[row] for row in moving])
    assert found["action"] == 0 and found["shape"] == found["colour"] == found["relation"] == 1


def test_a_still_clip_does_nothing(clips):
    told, video = clips
    found = score.score(video[:, :, :1].expand(-1, -1, 9, -1, -1), told)
    assert found["action"] == 0 and found["all"] == 0


def test_swapped_channels_change_the_colour(clips):
    told, video = clips
    reds = [row for row, each in enumerate(told) if each.colour == "red"]
    assert reds and score.score(video[reds].flip(1), [told[row] for row in reds])["colour"] == 0


def test_transposed_things_stand_elsewhere():
    scenes, video = draw(2)
    still = [row for row, each in enumerate(scenes) if each.action == "recolour"]
    assert still and score.score(video[still].mT, [scenes[row] for row in still])["relation"] == 0


def test_another_shape_is_not_taken_for_the_one_told(clips):
    others = list(shapes.SHAPES)
    told = [replace(each, shape=others[(others.index(each.shape) + 1) % len(others)]) for each in clips[0]]
    assert shares(clips, told)["shape"] == 0


def test_one_thing_is_not_two_and_nothing_is_none():
    scenes, video = draw(1)
    told = [replace(each, relation="above", other_shape="star", other_colour="red") for each in scenes]
    assert score.score(video, told)["all"] == 0
    assert [len(verdict.things) for verdict in classify(torch.full((2, 3, 9, 64, 64), -0.8))] == [0, 0]


def test_noise_is_like_no_drawing():
    generator = torch.Generator().manual_seed(0)
    blobs = torch.nn.functional.interpolate(torch.rand(20, 1, 8, 8, generator=generator), 20, mode="bicubic")
    video = torch.full((20, 3, 9, 64, 64), -0.9)
    video[..., 20:40, 20:40] = 2 * blobs[:, :, None].clamp(0, 1) - 1
    things = [thing for verdict in classify(video) for thing in verdict.things]
    assert len(things) >= 20 and sum(thing.shape is not None for thing in things) <= 2
