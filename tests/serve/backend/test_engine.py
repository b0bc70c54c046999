"""The engine without Triton: what each request is answered, and with whom it shares a batch."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest

from megadit.infer.media.video_io import encode_mp4
from megadit.infer.sampling.resolve import with_changed_defaults
from megadit.models.bundle import Bundle
from megadit.models.shared.errors import UserError
from megadit.models.text_encoders import ClassLabels
from megadit.serve.backend.engine import Engine, OpenRequest
from megadit.serve.contract import VideoRequest
from megadit.serve.events import (
    CancelledError,
    DeadlineExceededError,
    InvalidRequestError,
    ServiceError,
    StepDone,
    VideoResult,
)
from megadit.serve.repository.build import service_info


@dataclass
class Asker:
    """A request and everything that came back."""

    request: VideoRequest
    cancel_at: int | None = None
    seconds: float | None = None
    events: list = field(default_factory=list)
    endings: list = field(default_factory=list)

    def job(self) -> OpenRequest:
        return OpenRequest(
            request=self.request,
            send=self.events.append,
            end=self.endings.append,
            is_cancelled=lambda: self.cancel_at is not None and len(self.events) >= self.cancel_at,
            seconds=self.seconds,
        )

    @property
    def videos(self) -> list[VideoResult]:
        return [event for event in self.events if isinstance(event, VideoResult)]

    @property
    def steps(self) -> list[StepDone]:
        return [event for event in self.events if isinstance(event, StepDone)]


@pytest.fixture(scope="module")
def engine(pipeline, bundle_dir):
    bundle = Bundle.open(bundle_dir)
    return Engine(pipeline, service_info(bundle, bundle.defaults, None))


def run(engine, *askers):
    engine.run([asker.job() for asker in askers])
    assert all(len(asker.endings) == 1 for asker in askers), "every request ends exactly once"


def test_a_student_is_called_as_its_bundle_says(pipeline, bundle_dir):
    student = with_changed_defaults(Bundle.open(bundle_dir), ["sampler=consistency", "sigmas=20,2,0.4", "guidance=1"])
    info = service_info(student, student.defaults, None)
    plain = VideoRequest(prompt="a red seven", seed=5)
    askers = [Asker(plain), Asker(info.filled(plain)), Asker(info.filled(replace(plain, num_steps=2)))]
    run(Engine(pipeline, info), *askers)
    assert all(asker.endings == [None] for asker in askers)
    (expected,) = pipeline.stream(["a red seven"], student.defaults, seeds=5)
    comment = json.dumps({"prompt": "a red seven", "seed": 5, **asdict(expected.settings)})
    for asker in askers[:2]:  # a client that leaves nothing out asks for the same
        assert [(step.num_steps, round(step.sigma, 6)) for step in asker.steps] == [(3, 20), (3, 2), (3, 0.4)]
        data = encode_mp4(expected.video, 8, metadata={"comment": comment, "title": "a red seven"})
        assert asker.videos[0].data == data
    assert askers[2].videos[0].settings["sigmas"] == (), "two steps are not at the levels of three"


def test_a_request_gets_its_progress_and_the_video_of_generate(engine, pipeline):
    asker = Asker(VideoRequest(prompt="a red seven", seed=5))
    run(engine, asker)
    assert asker.endings == [None]
    assert [step.step for step in asker.steps] == [1, 2, 3, 4]
    assert [step.num_steps for step in asker.steps] == [4] * 4
    assert sorted((step.sigma for step in asker.steps), reverse=True) == [step.sigma for step in asker.steps]
    expected = pipeline(["a red seven"], seeds=5)[0]
    (video,) = asker.videos
    comment = json.dumps({"prompt": "a red seven", "seed": 5, **asdict(expected.settings)})
    assert video.data == encode_mp4(expected.video, 8, metadata={"comment": comment, "title": "a red seven"})
    assert (video.seed, video.prompt, video.settings["num_steps"]) == (5, "a red seven", 4)


def test_another_seed_prompt_or_negative_prompt_is_another_video(engine):
    askers = [
        Asker(VideoRequest(prompt="a", seed=1)),
        Asker(VideoRequest(prompt="a", seed=2)),
        Asker(VideoRequest(prompt="b", seed=1)),
        Asker(VideoRequest(prompt="a", seed=1, negative_prompt="green")),
        Asker(VideoRequest(prompt="a", seed=1, guidance=1.0)),
        Asker(VideoRequest(prompt="a", seed=1, eta=0.5)),
    ]
    run(engine, *askers)
    assert len({asker.videos[0].data for asker in askers}) == len(askers)


def test_noise_of_the_default_sampler_does_not_keep_clients_from_another(engine, pipeline, bundle_dir):
    """A client leaves nothing out, and so sends the default `eta` too; `generate` leaves it out (infer/settings.py)."""
    bundle = Bundle.open(bundle_dir)
    info = service_info(bundle, replace(bundle.defaults, eta=1.0), None)
    noisy = Engine(pipeline, info)
    asked = {"prompt": "a", "seed": 1}
    kept, quiet, given = (
        noisy.check(VideoRequest(**asked, **settings).filled(info.defaults, info.eta_samplers))[0]
        for settings in ({}, {"sampler": "DPMPP-2M"}, {"sampler": "EDM", "eta": 0.5})
    )
    assert [(each.sampler, each.eta) for each in (kept, quiet, given)] == [
        ("euler", 1.0), ("dpmpp_2m", 0.0), ("heun", 0.5)
    ]  # fmt: skip
    for sampler in info.samplers:
        filled = VideoRequest(**asked, sampler=sampler).filled(info.defaults, info.eta_samplers)
        assert noisy.check(filled) == noisy.check(VideoRequest(**asked, sampler=sampler))


def test_a_default_that_no_request_can_set_reaches_its_videos(pipeline, bundle_dir):
    """The share of the noise that a student begins with (`noise_scale`), whatever else a client asks for."""
    bundle = Bundle.open(bundle_dir)
    less = replace(bundle.defaults, noise_scale=0.5)
    engine = Engine(pipeline, info := service_info(bundle, less, None))
    for settings in ({}, {"sampler": "unipc", "num_steps": 3}):
        asked = VideoRequest(prompt="a", seed=1, **settings)
        assert (
            engine.check(asked)[0].noise_scale
            == engine.check(asked.filled(info.defaults, info.eta_samplers))[0].noise_scale
            == 0.5
        )
    asker = Asker(VideoRequest(prompt="a", seed=1))
    run(engine, asker)
    (expected,) = pipeline(["a"], seeds=[1], noise_scale=0.5)
    (whole,) = pipeline(["a"], seeds=[1])
    assert (expected.video != whole.video).any()
    comment = json.dumps({"prompt": "a", "seed": 1, **asdict(expected.settings)})
    assert asker.videos[0].data == encode_mp4(expected.video, 8, metadata={"comment": comment, "title": "a"})


def test_equal_settings_share_a_batch_and_others_do_not(engine):
    same = [Asker(VideoRequest(prompt=prompt, seed=seed)) for prompt, seed in (("a", 1), ("b", 2), ("c", 3))]
    other = Asker(VideoRequest(prompt="a", seed=1, num_frames=1))
    run(engine, *same, other)
    assert [asker.videos[0].batch_size for asker in same] == [3, 3, 3]
    assert other.videos[0].batch_size == 1
    assert [asker.videos[0].prompt for asker in same] == ["a", "b", "c"]
    assert other.videos[0].media_type == "image/png"


def test_several_videos_take_consecutive_seeds_in_order(engine):
    several, second = Asker(VideoRequest(prompt="a", seed=7, num_videos=3)), Asker(VideoRequest(prompt="a", seed=8))
    run(engine, several, second)
    assert [(video.index, video.seed) for video in several.videos] == [(0, 7), (1, 8), (2, 9)]
    assert several.videos[1].data == second.videos[0].data


BAD = (
    *({"prompt": text} for text in ("x" * 2**20, "bell\x07")),
    {"negative_prompt": "\0"},
    *({"guidance": scale} for scale in (float("nan"), float("inf"), -1.0)),
    *({"num_steps": steps} for steps in (0, 2**31 - 1)),
    *({"sampler": name} for name in ("eulr", "x" * 2**20)),
    *({"num_frames": frames} for frames in (-5, 2**31 - 1)),
    *({"height": 17}, {"height": 0}, {"width": -24}, {"fps": -1.0}, {"preview_every": -1}),
    *({"num_videos": videos} for videos in (0, 100)),
    *({"eta": 1.5}, {"eta": 0.5, "sampler": "dpmpp_2m"}),
)


def test_bad_requests_are_refused_and_their_neighbour_served(engine):
    bad, good = [Asker(replace(VideoRequest(prompt="a"), **change)) for change in BAD], Asker(VideoRequest(prompt="a"))
    run(engine, *bad, good)
    for change, asker in zip(BAD, bad, strict=True):
        (error,) = asker.endings
        assert isinstance(error, InvalidRequestError) and not asker.events, list(change)
        assert len(str(error)) < 300, "the answer does not repeat a huge input"
    assert len(good.videos) == 1


def test_cancelling_ends_within_a_step(engine):
    asker = Asker(VideoRequest(prompt="a", num_steps=30), cancel_at=3)
    run(engine, asker)
    assert isinstance(asker.endings[0], CancelledError)
    assert len(asker.steps) == 3 and not asker.videos


def test_a_cancelled_request_leaves_its_neighbours_unharmed(engine):
    cancelled, alone = Asker(VideoRequest(prompt="a", seed=1), cancel_at=2), Asker(VideoRequest(prompt="b", seed=2))
    run(engine, cancelled, alone)
    assert isinstance(cancelled.endings[0], CancelledError)
    assert len(alone.steps) == 4 and len(alone.videos) == 1


def test_the_denoiser_rests_when_nobody_waits(engine, pipeline, monkeypatch):
    calls = []
    denoiser = pipeline.denoiser
    monkeypatch.setattr(pipeline, "denoiser", lambda *arguments: calls.append(1) or denoiser(*arguments))
    askers = [Asker(VideoRequest(prompt="a", seed=seed, num_steps=30), cancel_at=3) for seed in (1, 2)]
    run(engine, *askers)
    assert len(calls) == 4, "the step at which they are found gone is the last"


def test_later_batches_are_made_when_the_first_was_for_nobody(engine, monkeypatch):
    monkeypatch.setattr("megadit.infer.pipeline.batches.TOKENS_PER_BATCH", 1)
    gone, stays = Asker(VideoRequest(prompt="a", seed=1), cancel_at=1), Asker(VideoRequest(prompt="b", seed=2))
    run(engine, gone, stays)
    assert isinstance(gone.endings[0], CancelledError)
    assert [video.batch_size for video in stays.videos] == [1]


def test_a_deadline_ends_the_work(engine):
    asker = Asker(VideoRequest(prompt="a", num_steps=30), seconds=1e-9)
    run(engine, asker)
    assert isinstance(asker.endings[0], DeadlineExceededError)
    assert not asker.events


def test_a_batch_size_splits_what_belongs_together(pipeline, engine):
    askers = [Asker(VideoRequest(prompt="a", seed=seed)) for seed in range(3)]
    run(Engine(pipeline, engine.info, batch_size=2), *askers)
    assert [asker.videos[0].batch_size for asker in askers] == [2, 2, 1]
    assert all(asker.endings == [None] for asker in askers)


def test_previews_come_when_asked_for(engine):
    asker, other = Asker(VideoRequest(prompt="a", preview_every=2)), Asker(VideoRequest(prompt="b"))
    run(engine, asker, other)
    assert [step.preview[:2] for step in asker.steps] == [b"\xff\xd8", b"", b"\xff\xd8", b""]
    assert not any(step.preview for step in other.steps)


def test_a_fault_ends_its_group_alone(engine, monkeypatch):
    def faulty(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("megadit.serve.backend.engine.encode_image", faulty)
    image, video = Asker(VideoRequest(prompt="a", num_frames=1)), Asker(VideoRequest(prompt="a"))
    run(engine, image, video)
    assert type(image.endings[0]) is ServiceError
    assert "out of memory" in str(image.endings[0])
    assert len(video.videos) == 1


def test_a_client_that_cannot_be_reached_is_a_fault_of_its_own(engine):
    asker, job = Asker(VideoRequest(prompt="a")), None

    def broken(event):
        raise OSError("gone")

    job = asker.job()
    job.send = broken
    engine.run([job])
    assert type(asker.endings[0]) is ServiceError


def test_check_gives_the_settings_of_generate(engine, pipeline):
    settings, _ = engine.check(VideoRequest(prompt="a", num_steps=7, sampler="HEUN"))
    assert (settings.num_steps, settings.sampler, settings.fps) == (7, "heun", 8)
    with pytest.raises(UserError, match="multiple of 4"):
        engine.check(VideoRequest(prompt="a", height=18))


def test_frames_of_the_video_are_those_asked_for(engine):
    asker = Asker(VideoRequest(prompt="a", num_frames=3, height=8, width=16))
    run(engine, asker)
    import imageio.v3 as iio

    frames = iio.imread(asker.videos[0].data, plugin="pyav", extension=".mp4")
    assert np.shape(frames) == (3, 8, 16, 3)


# ------------------------------------------------------------------------------------- strangers in one batch


def test_a_request_at_fault_fails_alone_and_its_text_reaches_nobody_else(engine, pipeline, monkeypatch):
    """As the latents of one prompt that are no finite numbers end the whole batch, in which they are found."""
    sample = pipeline._sample

    def faulty(batch, *arguments):
        found = next((prompt for prompt in batch.prompts if "secret" in prompt), None)
        if found is not None:
            raise UserError(f"the latents of {found!r} are not finite numbers")
        return sample(batch, *arguments)

    monkeypatch.setattr(pipeline, "_sample", faulty)
    bad, *good = (Asker(VideoRequest(prompt=prompt, seed=1)) for prompt in ("a secret", "b", "c"))
    run(engine, good[0], bad, good[1])
    assert isinstance(bad.endings[0], InvalidRequestError) and "a secret" in str(bad.endings[0])
    assert [asker.endings for asker in good] == [[None]] * 2
    assert [len(asker.videos) for asker in good] == [1, 1]
    assert not any("secret" in repr(event) for asker in good for event in asker.events)


def test_an_unknown_class_is_told_to_who_asked_for_it(engine, pipeline, monkeypatch):
    labels = ClassLabels(names=("red", "blue"))
    encoder = SimpleNamespace(encode=lambda texts: labels.encode(texts))
    monkeypatch.setattr(pipeline, "text_encoder", encoder)
    monkeypatch.setattr(Engine, "_generate", lambda self, group, *_: [each.finish() for each in group])
    bad, good = Asker(VideoRequest(prompt="a secret class")), Asker(VideoRequest(prompt="red"))
    run(engine, bad, good)
    assert isinstance(bad.endings[0], InvalidRequestError) and good.endings == [None]


def test_videos_that_were_sent_before_a_fault_are_not_sent_again(engine, pipeline, monkeypatch):
    monkeypatch.setattr("megadit.infer.pipeline.batches.TOKENS_PER_BATCH", 1)
    sample, calls = pipeline._sample, []

    def faulty(batch, *arguments):
        calls.append(batch.prompts)
        if len(calls) == 2:
            raise RuntimeError("once")
        return sample(batch, *arguments)

    monkeypatch.setattr(pipeline, "_sample", faulty)
    askers = [Asker(VideoRequest(prompt=prompt, num_videos=2)) for prompt in "ab"]
    run(engine, *askers)
    assert [[video.index for video in asker.videos] for asker in askers] == [[0, 1]] * 2
    assert calls == [["a"], ["a"], ["a"], ["b"], ["b"]], "the first of them was made once"


def test_a_text_is_measured_by_what_it_costs(engine, pipeline):
    limits = replace(engine.info.limits, max_text_tokens=3)
    strict = Engine(pipeline, replace(engine.info, limits=limits))
    askers = [Asker(VideoRequest(prompt="a b c")), Asker(VideoRequest(prompt="a b c d"))]
    askers.append(Asker(VideoRequest(prompt="a", negative_prompt="a b c d")))
    run(strict, *askers)
    assert askers[0].endings == [None]
    assert all("4 tokens" in str(asker.endings[0]) for asker in askers[1:])


def test_what_serves_holds_no_library_that_it_does_not_use():
    """torch's distributed checkpoints bring sympy along: 50 MB of each process."""
    names = ("torch.distributed.checkpoint", "sympy")
    code = f"import sys, megadit.serve.backend.engine; print([name in sys.modules for name in {names}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[False, False]\n"
