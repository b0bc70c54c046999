from dataclasses import fields, replace

import pytest

from megadit.infer.sampling.resolve import far_from_training, resolve_settings
from megadit.models.shared.errors import UserError

CHANGES = {
    "sampler": "heun",
    "num_steps": 4,
    "guidance": 3.0,
    "num_frames": 9,
    "height": 32,
    "width": 32,
    "fps": 30.0,
    "sigma_min": 0.5,
    "sigma_max": 5.0,
    "rho": 3.0,
    "negative_prompt": "blue",
    "schedule": "linear",
    "sigmas": [10.0, 1.0],
    "shift": 2.0,
    "noise_scale": 0.5,
    "churn": 3.0,
    "eta": 1.0,
    "guidance_interval": [0.1, 5.0],
    "guidance_rescale": 0.7,
}
TOGETHER = {
    "churn_interval": {"churn": 3.0, "churn_interval": [10.0, 15.0]},
    "second_prompt": {"second_prompt": "blue", "second_guidance": 1.0},
    "second_guidance": {"second_prompt": "", "second_guidance": 0.0},
}


def test_every_setting_changes_the_video(pipeline):
    def video(**settings):
        return pipeline(["a red seven"], **settings)[0].video

    plain = video()
    for name, value in CHANGES.items():
        assert not (video(**{name: value}).shape == plain.shape and (video(**{name: value}) == plain).all()), name
    assert (video(churn=3.0) != video(**TOGETHER["churn_interval"])).any()
    assert (video(**TOGETHER["second_prompt"]) != plain).any()
    assert (video(**TOGETHER["second_prompt"] | {"second_guidance": 2.0}) != video(**TOGETHER["second_prompt"])).any()
    tried = (
        set(CHANGES)
        | set(TOGETHER)
        | {"autoguidance", "cache_budget", "adapter_interval", "image_guidance", "low_guidance"}
    )  # which have tests of their own
    assert tried == {field.name for field in fields(pipeline.defaults)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gidance": 2.0}, "unknown setting 'gidance'; did you mean 'guidance'"),
        ({"schedule": "cosine"}, "schedule 'cosine' is not available"),
        ({"sigmas": [1.0, 2.0]}, "must decrease"),
        ({"shift": 0.0}, "shift=0 must be greater than 0"),
        ({"sigma_max": float("inf")}, "sigma_max=inf"),
        ({"guidance": float("nan")}, "guidance=nan"),
        ({"eta": 1.5}, "eta=1.5 must lie between 0 and 1"),
        (
            {"eta": 1.0, "sampler": "unipc"},
            "unipc cannot add noise by .* choose one of euler, heun, dpm2",
        ),
        ({"churn": 1.0, "sampler": "dpmpp_2m"}, "dpmpp_2m cannot add noise"),
        ({"guidance_interval": [2.0, 1.0]}, r"guidance_interval=\[2.0, 1.0\] must be two noise levels"),
        ({"churn_interval": [2.0]}, "must be two noise levels"),
        ({"second_prompt": "blue"}, "give both, or neither"),
        ({"second_guidance": 2.0}, "give both, or neither"),
        ({"autoguidance": "weak", "negative_prompt": "blue"}, "give one of them"),
        ({"autoguidance": "weak", "guidance": 1.0}, "other than 1"),
        ({"num_steps": 10**9}, "is more than the limit of 10000"),
    ],
)
def test_mistakes(pipeline, given, message):
    with pytest.raises(UserError, match=message):
        pipeline(["a"], **given)


def test_noise_of_the_defaults_is_left_out_with_another_solver(pipeline):
    noisy = replace(pipeline.defaults, sampler="euler", eta=1.0)
    assert resolve_settings(noisy, sampler="dpm2").eta == 1.0 == resolve_settings(noisy, num_steps=3).eta
    assert resolve_settings(noisy, sampler="unipc").eta == 0.0


def test_levels_of_the_defaults_are_left_out_where_a_schedule_is_asked_for(pipeline):
    """As of a record that --repeat reads, whose num_steps says how many levels there are."""
    levels = resolve_settings(pipeline.defaults, sigmas=[10.0, 5.0, 1.0])
    assert (levels.num_steps, levels.sigmas) == (3, (10.0, 5.0, 1.0))
    assert resolve_settings(levels) == levels == resolve_settings(levels, num_steps=3, schedule=levels.schedule)
    for asked in ({"num_steps": 7}, {"sigma_max": 50.0}, {"schedule": "linear"}):
        found = resolve_settings(levels, **asked)
        assert found.sigmas == () and {name: getattr(found, name) for name in asked} == asked
    assert resolve_settings(levels, num_steps=9, sigmas=[3.0]).sigmas == (3.0,)


def test_the_shift_of_a_resolution_starts_from_the_checkpoints(pipeline):
    """Not from that of a record which --repeat reads."""
    usual = pipeline.defaults
    large = resolve_settings(usual, height=4 * usual.height, shift="auto")
    assert large.shift == 2
    assert resolve_settings(replace(large, shift=1.0), trained=usual, shift="auto").shift == 2
    assert resolve_settings(large, trained=usual, height=usual.height, shift="auto").shift == 1


def test_a_warning_for_shapes_far_from_training(pipeline):
    def warning(**given):
        settings = resolve_settings(pipeline.defaults, **given)
        return far_from_training(settings, pipeline.defaults, pipeline.config, pipeline.tokenizer)

    assert warning() is None and warning(height=32, width=16) is None
    assert warning(num_frames=1) is None  # an image is a shape of its own
    assert "5 frames of 40x24 are far from" in warning(height=40) and "(height)" in warning(height=40)
    assert "(frames, width)" in warning(num_frames=41, width=8)
    assert replace(pipeline.defaults) == pipeline.defaults
