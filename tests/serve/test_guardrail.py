"""A content filter in the service: it sees every prompt and video, and what it fails on does not pass."""

from dataclasses import replace

import pytest

from megadit.infer.hooks.guardrail import Guardrail
from megadit.models.bundle import Bundle
from megadit.models.shared.errors import UserError
from megadit.serve.backend.engine import Engine
from megadit.serve.contract import VideoRequest
from megadit.serve.events import HeldBackError, InvalidRequestError
from megadit.serve.repository.build import build_repository, service_info

from .backend.test_engine import Asker, run

PROGRAM = """
import numpy

def check_prompt(prompt):
    if "throw" in prompt:
        raise KeyError("secret")
    if "exit" in prompt:
        raise SystemExit("secret")
    return "it is about sevens" if "seven" in prompt else None

def check_video(video):
    what = WHAT.get(int(video[0, 0, 0, 0]), "pass")
    if what == "throw":
        raise RuntimeError("secret")
    return {"hold": "too bright", "wrong": video[:1], "none": None, "black": numpy.zeros_like(video)}.get(what, video)
"""
REQUEST = VideoRequest(prompt="a red three", seed=1)


@pytest.fixture
def guarded(pipeline, bundle_dir, tmp_path):
    """guarded({seed: what the filter does with the video of this seed}): an engine with such a filter."""
    bundle = Bundle.open(bundle_dir)
    corners = {seed: int(pipeline(["a red three"], seeds=seed)[0].video[0, 0, 0, 0]) for seed in range(1, 7)}
    assert len(set(corners.values())) == 6, "by which the filter knows them"

    def make(what: dict[int, str]) -> Engine:
        program = f"WHAT = { {corners[seed]: does for seed, does in what.items()} }\n{PROGRAM}"
        (tmp_path / "guardrail.py").write_text(program)
        info = service_info(bundle, bundle.defaults, None)
        return Engine(pipeline, info, guardrail=Guardrail.load(tmp_path))

    return make


def test_what_is_held_back_ends_alone(guarded, pipeline, monkeypatch):
    monkeypatch.setattr("megadit.serve.backend.engine.encode_mp4", lambda video, fps, metadata: video.tobytes())
    faults = {2: "throw", 3: "hold", 4: "wrong", 5: "none"}
    engine = guarded(faults | {6: "black"})
    askers = {seed: Asker(replace(REQUEST, seed=seed)) for seed in range(1, 7)}
    prompts = [Asker(replace(REQUEST, prompt=text)) for text in ("a red seven", "please throw", "exit")]
    run(engine, *askers.values(), *prompts)
    for asker in (*(askers[seed] for seed in faults), *prompts):
        (error,) = asker.endings
        assert isinstance(error, HeldBackError) and isinstance(error, InvalidRequestError) and not asker.videos
        assert "secret" not in str(error) and "\n" not in str(error)
    assert "too bright" in str(askers[3].endings[0]) and "sevens" in str(prompts[0].endings[0])
    assert not any(asker.events for asker in prompts), "before any work"
    assert askers[1].endings == askers[6].endings == [None] and askers[1].videos[0].batch_size == 6, "in one run"
    assert askers[1].videos[0].data == pipeline(["a red three"], seeds=1)[0].video.tobytes()
    assert not any(askers[6].videos[0].data), "what check_video gives is given out"
    alone = Asker(replace(REQUEST, seed=2, num_videos=2))
    run(engine, alone)
    assert isinstance(alone.endings[0], HeldBackError)


def test_previews_show_nothing_that_is_screened_later(guarded):
    engine = guarded({})
    run(engine, shown := Asker(replace(REQUEST, preview_every=1)))
    assert not any(step.preview for step in shown.steps) and len(shown.videos) == 1
    engine.guardrail = replace(engine.guardrail, check_video=None)
    run(engine, shown := Asker(replace(REQUEST, preview_every=1)))
    assert all(step.preview for step in shown.steps), "the control"


def test_a_folder_without_a_filter_is_told_before_anything_is_written(bundle_dir, tmp_path):
    with pytest.raises(UserError, match="there is no guardrail.py"):
        build_repository(bundle_dir, tmp_path / "models", guardrail_dir=tmp_path)
    assert not (tmp_path / "models").exists()
