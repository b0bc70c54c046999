"""`megadit prepare shapes`: what its shards hold, and that its options decide it."""

from collections import Counter

import pytest
import torch

from megadit.train.data.prepare import command as prepare
from megadit.train.data.prepare import drawn
from megadit.train.demos.shapes import data as shapes
from megadit.train.demos.shapes.samples import SHAPES


def test_every_option_reaches_the_data_set(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(drawn, "prepare_drawn", lambda source, out, **counts: asked.append((source.name, out, counts)))
    options = ["--num_clips", "5", "--num_images", "6", "--num_val", "7", "--seed", "8"]
    assert prepare.main(["shapes", str(tmp_path / "out"), *options]) == 0
    counts = {"num_clips": 5, "num_images": 6, "num_val": 7, "seed": 8}
    assert asked == [("shapes", tmp_path / "out", counts)]


@pytest.mark.parametrize("kind", ["clip", "image"])
def test_samples_are_scenes_that_training_sees(kind):
    chunk = SHAPES.chunk_of("train", kind, range(40, 60), torch.Generator().manual_seed(0))
    frames = shapes.NUM_FRAMES if kind == "clip" else 1
    assert chunk.video_BCTHW.shape == (20, 3, frames, shapes.FRAME_SIZE, shapes.FRAME_SIZE)
    assert chunk.keys[0] == f"train-{kind}-000040" and len(set(chunk.keys)) == 20
    pairs = sum(sum(word in shapes.SHAPES for word in caption.split()) == 2 for caption in chunk.captions)
    assert pairs == 12 and (chunk.image_captions is None) == (kind == "image")


def test_clips_show_each_action_as_often_as_its_share_says():
    scenes = shapes.random_scenes(2000, 1, torch.Generator().manual_seed(1), actions=shapes.IN_TRAINING["clip"])
    counts = Counter(scene.action for scene in scenes)
    shares = sum(action.share for action in shapes.ACTIONS.values())
    for name, action in shapes.ACTIONS.items():
        assert counts[name] / 2000 == pytest.approx(action.share / shares, rel=0.25)
    assert len({action.share for action in shapes.ACTIONS.values()}) > 1


def test_the_same_seed_gives_the_same_samples():
    first, again = (SHAPES.chunk_of("val", "clip", range(4), torch.Generator().manual_seed(3)) for _ in range(2))
    assert first.captions == again.captions and torch.equal(first.video_BCTHW, again.video_BCTHW)
    assert first.image_captions == again.image_captions
