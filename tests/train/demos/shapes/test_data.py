"""Scenes of drawn things: what training sees and does not, captions that tell the truth, drawings that do as told."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megadit.train.demos.digits.data import COLOURS
from megadit.train.demos.shapes import data as shapes
from megadit.train.demos.shapes.data import ACTIONS, BACKGROUNDS, RELATIONS, SHAPES, Scene


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("num_things", [1, 2])
def test_training_never_draws_what_is_left_out(num_things):
    seen = shapes.random_scenes(3000, num_things, generator())
    unseen = shapes.random_scenes(300, num_things, generator(), unseen=True)

    def combinations(scenes):
        return {(each.shape, each.colour, each.action) for each in scenes} if num_things == 1 else set(scenes)

    assert not combinations(seen) & combinations(unseen)
    assert not any(each.is_unseen for each in seen) and all(each.is_unseen for each in unseen)
    counts = [Counter(getattr(each, name) for each in seen) for name in ("shape", "colour", "action", "background")]
    assert [len(each) for each in counts] == [len(each) for each in (SHAPES, COLOURS, ACTIONS, BACKGROUNDS)]
    assert all(min(each.values()) > 0.5 * 3000 / len(each) for each in counts)


def test_captions_tell_the_scene_and_nothing_else():
    words = {"shape": set(SHAPES), "colour": set(COLOURS)}
    for scene in shapes.random_scenes(100, 1, generator()) + shapes.random_scenes(200, 2, generator()):
        for caption in shapes.captions(scene):
            said = caption.split()
            assert [word for word in said if word in words["shape"]] == [
                name for name in (scene.shape, scene.other_shape) if name
            ]
            assert [word for word in said if word in words["colour"]] == [
                name for name in (scene.colour, scene.becomes, scene.other_colour) if name
            ]
            verbs = [verb.format(becomes=scene.becomes) for verb in ACTIONS[scene.action].verbs]
            assert any(f" {scene.shape} {verb}" in caption for verb in verbs)
            places = [place for place in BACKGROUNDS if caption.endswith(place)]
            assert places in ([], [scene.background])
            if scene.relation:
                joints = RELATIONS[scene.relation].wordings
                assert any(f" {joint} a {scene.other_colour} {scene.other_shape}" in caption for joint in joints)


def test_neutral_captions_name_neither_things_nor_their_colours():
    for scene in shapes.random_scenes(100, 1, generator()) + shapes.random_scenes(100, 2, generator()):
        said = set(shapes.neutral_caption(scene, generator(1)).split())
        assert not said & set(SHAPES) and said & set(COLOURS) == ({scene.becomes} if scene.becomes else set())


def test_the_seed_decides():
    def draw(seed: int) -> tuple[list[str], torch.Tensor]:
        source = generator(seed)
        scenes = shapes.random_scenes(6, 1, source) + shapes.random_scenes(6, 2, source)
        return shapes.random_captions(scenes, source), shapes.draw_scenes(scenes, source)

    (said, first), (said_again, again), (said_other, other) = draw(1), draw(1), draw(2)
    assert said == said_again and torch.equal(first, again)
    assert said != said_other and not torch.equal(first, other)


def test_things_are_brighter_than_every_background():
    scenes = [Scene(shape="star", colour=colour, background=place) for colour in COLOURS for place in BACKGROUNDS]
    brightest_BHW = (shapes.draw_scenes(scenes, generator(), 1).amax(1)[:, 0] + 1) / 2
    assert (brightest_BHW[:, 0].amax(1) < 0.36).all() and (brightest_BHW[:, 32, 32] > 0.8).all()


def test_a_turn_is_clockwise():
    """A castle's top goes from the left to the right."""
    upright = Scene(shape="castle", colour="white")
    turned = replace(upright, action="turn")
    still, clip = (shapes.draw_scenes([scene], generator())[0, 0] for scene in (upright, turned))

    def top(frame_HW: torch.Tensor) -> float:
        return float((frame_HW[:32] > 0.2).float().sum(0) @ torch.arange(64.0) / (frame_HW[:32] > 0.2).sum())

    assert top(clip[0]) < top(still[0]) - 2 and top(clip[-1]) > top(still[-1]) + 2
    torch.testing.assert_close(clip[4], still[4], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("action", "axis", "sign"), [("left", 1, -1), ("right", 1, 1), ("up", 0, -1), ("down", 0, 1)])
def test_a_thing_moves_as_told(action, axis, sign):
    clip_THW = shapes.draw_scenes([Scene(shape="star", colour="white", action=action)], generator())[0, 0]
    first, last = ((clip_THW[time] > 0.2).nonzero().float().mean(0) for time in (0, -1))
    travelled = (last - first) * sign
    assert travelled[axis] == pytest.approx(shapes.TRAVEL, abs=1) and travelled[1 - axis].abs() < 1


@pytest.mark.parametrize(
    ("relation", "axis", "sign"), [("left", 1, -1), ("right", 1, 1), ("above", 0, -1), ("below", 0, 1)]
)
def test_a_thing_is_where_the_caption_says(relation, axis, sign):
    """A red one, seen from a blue one."""
    scene = Scene(shape="star", colour="red", relation=relation, other_shape="heart", other_colour="blue")
    red, _, blue = shapes.draw_scenes([scene], generator(), 1)[0, :, 0]
    variant = [(here > there).nonzero().float().mean(0) for here, there in ((red - 0.5, blue), (blue - 0.5, red))]
    assert (variant[0] - variant[1])[axis] * sign > 28
