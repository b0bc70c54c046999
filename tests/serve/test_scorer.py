"""`evaluate`: a judge's scores beside each video whose request asks for them, before Triton."""

from dataclasses import replace
from pathlib import Path

import pytest

from megadit.infer.hooks.scorer import Scorer
from megadit.models.bundle import Bundle
from megadit.models.shared.errors import UserError
from megadit.serve.backend.engine import Engine
from megadit.serve.contract import VideoRequest
from megadit.serve.events import InvalidRequestError
from megadit.serve.repository.build import build_repository, service_info

from .backend.test_engine import Asker, run

ASKED = VideoRequest(prompt="a red seven moving left", seed=1, evaluate=True)
PROGRAM = """
def score(video, prompt):
    if "throw" in prompt:
        raise KeyError("secret")
    if "exit" in prompt:
        raise SystemExit(1)
    scores = {"mean": video.mean(), "words": len(prompt.split())}
    video[:] = 0
    more = {"nan": {"nan": float("nan")}, "number": {7: 1.0}, "long": {"x" * 101: 1.0}, "line": {"a\\nb": 1.0}}
    return {"list": [1.0], "many": {str(name): 0.0 for name in range(65)}}.get(prompt, scores | more.get(prompt, {}))
"""


def judge_in(folder: Path, program: str) -> Path:
    folder.mkdir()
    (folder / "scorer.py").write_text(program)
    return folder


@pytest.fixture
def judged(pipeline, bundle_dir, tmp_path):
    bundle = Bundle.open(bundle_dir)
    info = replace(service_info(bundle, bundle.defaults, None), has_scorer=True)
    return Engine(pipeline, info, scorer=Scorer.load(judge_in(tmp_path / "judge", PROGRAM)))


def test_scores_are_given_to_who_asks_and_a_judge_that_fails_costs_no_video(judged, pipeline):
    good = ["a red three", "seven"]
    bad = ["please throw", "exit", "nan", "number", "long", "line", "list", "many"]
    askers = [Asker(replace(ASKED, prompt=text)) for text in good + bad]
    unasked = Asker(replace(ASKED, prompt=good[0], evaluate=False))
    run(judged, *askers, unasked)
    assert [asker.endings for asker in (*askers, unasked)] == [[None]] * (len(askers) + 1)
    for asker, text in zip(askers, good, strict=False):
        expected = pipeline([text], seeds=1)[0].video.mean()
        own = {"mean": pytest.approx(expected, abs=0.1), "words": len(text.split())}
        assert asker.videos[0].scores == own, "in one batch each has its own"
    assert [asker.videos[0].scores for asker in askers[len(good) :]] == [{}] * len(bad)
    assert unasked.videos[0].scores is None
    assert askers[0].videos[0].data == unasked.videos[0].data, "what a judge does to the frames stays with it"


def test_a_service_without_a_judge_refuses(pipeline, bundle_dir):
    bundle = Bundle.open(bundle_dir)
    run(Engine(pipeline, service_info(bundle, bundle.defaults, None)), asker := Asker(ASKED))
    assert isinstance(asker.endings[0], InvalidRequestError) and "has no scorer" in str(asker.endings[0])
    assert not asker.events, "before any work"


@pytest.mark.parametrize(
    ("program", "message"), [("x = 1", "defines no function score"), ("1 / 0", "scorer.py fails: ZeroDivisionError")]
)
def test_programs_that_are_no_judge(program, message, tmp_path):
    with pytest.raises(UserError, match=message):
        Scorer.load(judge_in(tmp_path / "judge", program))


def test_a_folder_without_a_judge_is_told_before_anything_is_written(bundle_dir, tmp_path):
    with pytest.raises(UserError, match="there is no scorer.py"):
        build_repository(bundle_dir, tmp_path / "models", scorer_dir=tmp_path)
    assert not (tmp_path / "models").exists()
