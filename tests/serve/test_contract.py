from dataclasses import replace

import pytest

from megadit.models.diffusion.settings import SERVED
from megadit.models.shared.cli.setting import other_names
from megadit.models.shared.errors import UserError
from megadit.serve.contract import INPUTS, VideoRequest
from megadit.serve.events import StepDone, VideoResult, event_from_wire, event_to_wire
from megadit.serve.service_info import Limits, ServiceInfo

LIMITS = Limits(max_prompt_characters=20, max_videos=2, max_frames=9, max_pixels=9 * 16 * 16, max_work=9 * 16 * 16 * 10)
SIZE = {"num_videos": 1, "num_frames": 9, "height": 16, "width": 16, "fps": 8.0, "num_steps": 10}


def test_every_field_of_a_request_is_an_input_and_the_reverse():
    names = {each.name for each in INPUTS}
    assert names - other_names(SERVED).keys() == set(VideoRequest.__dataclass_fields__)


def test_request_survives_its_inputs():
    request = VideoRequest(prompt="a", seed=3, guidance=1.5, sampler="heun")
    inputs = {"prompt": "a", "seed": 3, "guidance": 1.5, "sampler": "heun"}
    assert request.to_inputs() == inputs | {"evaluate": False}
    assert VideoRequest.from_inputs(request.to_inputs()) == request


def test_a_filled_request_leaves_nothing_out_and_keeps_what_was_given():
    defaults = {name: 1 for name in SERVED} | {"sigma_min": 0.1}
    filled = VideoRequest(prompt="a", num_steps=7, seed=3).filled(defaults)
    assert (filled.num_steps, filled.seed, filled.height, filled.num_videos) == (7, 3, 1, 1)
    assert None not in [getattr(filled, name) for name in VideoRequest.__dataclass_fields__]


@pytest.mark.parametrize(
    "names",
    [
        ("unconditional_guidance_scale", "image_guidance", "inference_steps"),
        ("text_cfg_scale", "image_cfg_scale", "steps"),
        ("cfg_text", "cfg_image", "steps"),
        ("guidance_scale", "image_guidance_scale", "num_inference_steps"),
    ],
)
def test_names_of_other_programs_mean_ours(names):
    """NeMo's deployed pipelines, its InstructPix2Pix as deployed and as configured, and diffusers."""
    request = VideoRequest.from_inputs({"prompt": "a"} | dict(zip(names, (7.5, 1.2, 12), strict=True)))
    assert (request.guidance, request.image_guidance, request.num_steps) == (7.5, 1.2, 12)


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({}, "'prompt' is missing"),
        ({"prompt": "a", "gidance": 1.0}, "did you mean 'guidance'"),
        ({"prompt": "a", "num_steps": 1, "inference_steps": 2}, "num_steps and inference_steps are names of one"),
        ({"prompt": "a", "cfg_text": 1.0, "guidance": 2.0}, "cfg_text and guidance are names of one"),
    ],
)
def test_wrong_inputs_are_told(inputs, told):
    with pytest.raises(UserError, match=told):
        VideoRequest.from_inputs(inputs)


@pytest.mark.parametrize(
    "event",
    [
        StepDone(step=1, num_steps=4, sigma=0.5, seconds_left=1.5, preview=b"\xff\xd8"),
        VideoResult(
            data=b"\x00\x01",
            media_type="video/mp4",
            index=1,
            prompt="ä \N{SNOWMAN}",
            seed=-5,
            settings={"fps": 8.0},
            seconds=0.1,
            batch_size=3,
        ),
    ],
)
def test_events_survive_the_wire(event):
    text, data = event_to_wire(event)
    assert event_from_wire(text, data) == event


def test_service_info_survives_json():
    info = ServiceInfo(
        defaults={"fps": 8.0}, limits=LIMITS, samplers=("euler",), size_multiple=8, examples=('a "b" \\ ä',)
    )
    assert ServiceInfo.from_json(info.to_json()) == info


def test_a_prompt_far_longer_than_any_caption_is_warned_of():
    info = ServiceInfo(defaults={}, limits=LIMITS, samplers=(), size_multiple=1, longest_caption=6)
    assert "a prompt has 13 words" in info.warning(VideoRequest(prompt="a " * 13))
    assert "a prompt has 13 words" in info.warning(VideoRequest(instruction="a " * 13))
    for request in (VideoRequest(prompt="a " * 12), VideoRequest(prompt="a " * 13, adapters=("zog:1",))):
        assert info.warning(request) is None
    assert replace(info, longest_caption=None).warning(VideoRequest(prompt="a " * 99)) is None


def test_what_is_just_allowed_passes():
    LIMITS.check_text("prompt", "x" * 20)
    LIMITS.check_text("prompt", "two\nlines\tand a tab")
    LIMITS.check_size(**SIZE)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_videos": 3}, "num_videos=3"),
        ({"num_videos": 0}, "num_videos=0"),
        ({"num_videos": -1}, "num_videos=-1"),
        ({"num_frames": 10, "height": 8}, "num_frames=10"),
        ({"height": 24}, "2,304"),
        ({"num_steps": 11}, "pixel steps"),
        ({"num_videos": 2}, "pixel steps"),
        ({"fps": 0.0}, "fps=0"),
        ({"fps": float("nan")}, "fps=nan"),
        ({"fps": 1e9}, "fps=1e"),
    ],
)
def test_more_than_the_limits_is_refused(change, told):
    with pytest.raises(UserError, match=told):
        LIMITS.check_size(**SIZE | change)


@pytest.mark.parametrize(("text", "told"), [("x" * 21, "21 characters"), ("bell \x07", r"U\+0007"), ("\0", r"U\+0000")])
def test_texts_beyond_the_limits_are_refused(text, told):
    with pytest.raises(UserError, match=told):
        LIMITS.check_text("prompt", text)
