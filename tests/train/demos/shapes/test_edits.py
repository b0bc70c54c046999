"""Edits of scenes: one thing is changed of each."""

from collections import Counter
from dataclasses import fields

import pytest

from megadit.train.demos.shapes import score, subject
from megadit.train.demos.shapes.classifier import name_backgrounds
from megadit.train.demos.shapes.data import ACTIONS, Scene
from megadit.train.demos.shapes.demo import real_clips
from megadit.train.demos.shapes.edits import CHANGES, edits, full_caption, score_edits


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [scene for scenes in score.scored_scenes(12).values() for scene in scenes]


@pytest.mark.parametrize("change", CHANGES)
def test_one_thing_is_changed(scenes, change):
    pairs = edits(scenes)[change]
    assert len(pairs) == len(scenes) // len(CHANGES)
    for before, after in pairs:
        changed = {field.name for field in fields(Scene) if getattr(before, field.name) != getattr(after, field.name)}
        assert change in changed and changed <= {change, "becomes" if change == "action" else change}
        assert after.shape != after.other_shape and (after.colour != before.becomes or after.becomes is None)


def test_captions_of_edits_name_everything(scenes):
    for scene in scenes:
        assert all(
            name in full_caption(scene)
            for name in (scene.shape, scene.colour, scene.background, scene.other_shape or "")
        )


def test_real_clips_are_right_and_keep_their_background(scenes):
    clips = real_clips(scenes)
    assert name_backgrounds(clips) == [scene.background for scene in scenes]
    found = score_edits(clips, scenes)
    assert found["all"] == found["background"] == 1.0
    moved = score_edits(clips.roll(1, 0), scenes)
    assert moved["all"] < 0.2 and moved["background"] < 0.6


def test_the_subject_is_shown_in_every_action_and_asked_for_in_others():
    shown = subject.shown()
    assert len(shown) == subject.NUM_CLIPS and Counter(each.action for each in shown).keys() == set(ACTIONS) - {
        "recolour"
    }
    seen = {(each.colour, each.action) for each in shown}
    for kind, scenes in subject.asked().items():
        assert {each.shape for each in scenes} == {subject.NAME} and not seen & {(s.colour, s.action) for s in scenes}
        assert {each.num_things for each in scenes} == {2 if kind.endswith("beside") else 1}
        assert score.score(real_clips(scenes), scenes)["all"] == 1.0
