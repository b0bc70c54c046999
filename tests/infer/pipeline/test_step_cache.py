import json
import math
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megadit.infer.commands import calibrate_cache
from megadit.infer.commands.calibrate_cache import relative_errors
from megadit.infer.generate.command import main as generate
from megadit.infer.media.video_io import write_video
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.pipeline.step_cache import CachePlan, cached, find_plan, plan_key
from megadit.infer.sampling.resolve import resolve_settings
from megadit.infer.sampling.samplers import SAMPLERS
from megadit.infer.sampling.schedules import karras_sigmas
from megadit.models.bundle import Bundle
from megadit.models.shared.errors import UserError

X = torch.zeros(2, 3)


def of_angle(function):
    """A denoiser that depends on t = atan(sigma) alone, and the levels it was asked at."""
    asked = []

    def denoise(x, sigma_B):
        asked.append(sigma_B[0].item())
        return function(sigma_B.double().atan()).float()[:, None].expand_as(x)

    return denoise, asked


def answers(denoise, sigmas):
    return [denoise(X, torch.full((2,), sigma))[0, 0].item() for sigma in sigmas]


def test_a_line_over_the_angle_is_foretold_exactly():
    sigmas = [math.tan(angle) for angle in (1.5, 1.4, 1.3, 1.1, 1.0, 0.9)]
    denoise, asked = of_angle(lambda t: 3 * t - 1)
    foretold = answers(cached(denoise, [2, 4], sigma_data=1.0), sigmas)
    assert foretold == pytest.approx([3 * math.atan(sigma) - 1 for sigma in sigmas], abs=1e-5)
    assert asked == pytest.approx([sigmas[place] for place in (0, 1, 3, 5)])
    # Negative control: what bends is not.
    bent, _ = of_angle(lambda t: t**3)
    assert abs(answers(cached(bent, [2], sigma_data=1.0), sigmas)[2] - 1.3**3) > 0.01


def test_predictions_in_a_row_go_on_no_longer_than_was_seen():
    sigmas = [math.tan(angle) for angle in (1.5, 1.4, 1.3, 1.1, 0.5)]
    denoise, _ = of_angle(lambda t: t)
    assert answers(cached(denoise, [2, 3, 4], sigma_data=1.0), sigmas) == pytest.approx([1.5, 1.4, 1.3, 1.3, 1.3])
    assert answers(cached(denoise, [1, 2, 3, 4], sigma_data=1.0), sigmas) == pytest.approx([1.5] * 5)


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_runs_with_spared_calls(name):
    denoise, asked = of_angle(lambda t: 0.1 * t)
    sigmas = karras_sigmas(8)
    x = 80 * torch.ones(2, 3, dtype=torch.float64)
    exact = SAMPLERS[name](denoise, x, sigmas)
    num_calls = len(asked)
    spared = SAMPLERS[name](cached(denoise, [3, 5], sigma_data=1.0), x, sigmas)
    assert len(asked) == 2 * num_calls - 2
    torch.testing.assert_close(spared, exact, atol=5e-3, rtol=0)


def plan(settings, budget, skipped):
    return CachePlan(
        budget=budget,
        skipped=skipped,
        num_calls=9,
        largest_error=0.0,
        num_videos=16,
        settings=plan_key(settings),
    )


def test_a_plan_belongs_to_its_settings_and_budget(pipeline):
    settings = resolve_settings(pipeline.defaults, sigmas=[9, 3, 1], guidance_interval=[0.1, 5.0])
    plans = [plan(settings, 0.01, (1,)), plan(settings, 0.02, (1, 2)), plan(pipeline.defaults, 0.02, (1, 2))]
    plans = [CachePlan.from_dict(json.loads(json.dumps(one.to_dict()))) for one in plans]

    def chosen(**changes):
        return find_plan(plans, resolve_settings(settings, **changes))

    assert chosen(cache_budget=0.03).skipped == chosen(cache_budget=0.02).skipped == (1, 2)
    assert chosen(cache_budget=0.019, negative_prompt="green", fps=3.0).skipped == (1,)
    sizes = ({"height": 32}, {"width": 48}, {"num_frames": 9}, {"guidance": 5.0}, {"num_steps": 7, "sigmas": []})
    for changes in ({"cache_budget": 0.005}, *({"cache_budget": 0.02, **other} for other in sizes)):
        with pytest.raises(UserError, match="run: megadit calibrate-cache"):
            chosen(**changes)


def test_a_plan_of_a_version_with_fewer_settings_is_found(pipeline):
    settings = resolve_settings(pipeline.defaults, cache_budget=0.02)
    stored = plan(settings, 0.02, (1,)).to_dict()
    del stored["settings"]["noise_scale"]
    plans = [CachePlan.from_dict(stored)]
    assert find_plan(plans, settings).skipped == (1,)
    with pytest.raises(UserError, match="run: megadit calibrate-cache"):
        find_plan(plans, replace(settings, noise_scale=0.8))


@pytest.fixture(scope="module")
def calibrated(bundle_dir, tmp_path_factory, request):
    """A bundle with a plan for eight steps, under further settings if a test names them, and what the command said."""
    more = [str(word) for name, values in getattr(request, "param", {}).items() for word in (f"--{name}", *values)]
    path = shutil.copytree(bundle_dir, tmp_path_factory.mktemp("calibrated") / "bundle")
    arguments = ["--checkpoint_path", str(path), "--num_steps", "8", "--cache_budget", "0.2"]
    prompts = ["--prompt", "a", "b", "c", "d", "--seeds", "1", "2", "3", "4"]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as told:
        patch.setattr(calibrate_cache, "NUM_DISTRIBUTED", 2)
        assert calibrate_cache.main([*arguments, *prompts, *more, "--device", "cpu"]) == 0
    return path, told.getvalue()


def test_calibration_stores_a_plan_that_keeps_its_budget(calibrated):
    path, told = calibrated
    (stored,) = Bundle.open(path, verify=True).manifest["cache"]
    assert stored["num_calls"] == 8 and stored["num_videos"] == 16 and 0 < len(stored["skipped"]) < 8
    assert 0 < stored["largest_error"] <= 0.85 * 0.2
    assert told.startswith(f"{len(stored['skipped'])} of 8 calls are cached")
    pipeline = TextToVideo.from_pretrained(path, device="cpu")
    prompts, seeds = ["e", "f", "g"], [7, 8, 9]
    exact = pipeline(prompts, seeds=seeds, num_steps=8)
    steps = []
    spared = pipeline(prompts, seeds=seeds, num_steps=8, cache_budget=0.2, on_step=steps.append)
    assert spared[0].num_denoiser_calls == 8 - len(stored["skipped"]) and len(steps) == 8
    latents = [torch.stack([one.latents_CTHW for one in results]) for results in (spared, exact)]
    errors = relative_errors(*latents)
    assert (errors > 0).all() and (errors < 0.3).all()
    # No video depends on its batch.
    (alone,) = pipeline(["f"], seeds=8, num_steps=8, cache_budget=0.2)
    assert relative_errors(alone.latents_CTHW[None], spared[1].latents_CTHW[None]).item() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("calibrated", [{"guidance": [3.0], "guidance_interval": [0.3, 5.0]}], indirect=True)
def test_a_plan_under_a_guidance_interval_keeps_its_budget_and_is_for_that_interval_alone(calibrated):
    """A predicted call may stand beside one without guidance."""
    pipeline = TextToVideo.from_pretrained(calibrated[0], device="cpu")
    settings = {"seeds": [7, 8, 9], "num_steps": 8, "guidance": 3.0, "guidance_interval": (0.3, 5.0)}
    exact, spared = (pipeline(["e", "f", "g"], cache_budget=budget, **settings) for budget in (0.0, 0.2))
    assert 0 < spared[0].num_denoiser_calls < 8 == exact[0].num_denoiser_calls
    errors = relative_errors(*(torch.stack([one.latents_CTHW for one in results]) for results in (spared, exact)))
    assert (errors > 0).all() and (errors < 0.3).all()
    with pytest.raises(UserError, match="was not calibrated for these settings"):
        pipeline(["e"], cache_budget=0.2, **settings | {"seeds": 7, "guidance_interval": ()})


def test_a_check_tells_how_many_videos_keep_the_budget(calibrated, capsys):
    path, told = calibrated
    arguments = ["--checkpoint_path", str(path), "--num_steps", "8", "--device", "cpu", "--cache_budget", "0.2"]
    assert calibrate_cache.check([*arguments, "--prompt", "e", "f", "g", "--seed", "9"]) == 0
    stdout = capsys.readouterr().out
    # as many calls as the calibration said, and the errors of these videos, not of those it was calibrated with
    assert stdout.startswith(told.split(",")[0] + "; ") and "of 3 videos are within 0.2: median 0." in stdout
    assert 0 < float(stdout.split()[-1]) != pytest.approx(float(told.split()[-1]), abs=1e-4)


# -------------------------------------------------------------------------------------------------- given parts


GIVEN = {
    "first_frame": {"image": "{number}.png"},
    "inpaint": {"video": "{number}.gif", "mask": "mask.png"},
    "edit": {"video": "{number}.gif", "image_guidance": 1.5},
}
"""Use -> what a line of a prompt file says of it."""


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """Clips of 9 frames, their first frames, and a mask."""
    folder, generator = tmp_path_factory.mktemp("room"), np.random.default_rng(0)
    for number in range(11):
        colour = generator.integers(0, 200, 3) + 5 * np.arange(9)[:, None, None, None]
        frames = np.broadcast_to(colour.astype(np.uint8), (9, 16, 24, 3))
        write_video(folder / f"{number}.gif", frames, 8)
        write_video(folder / f"{number}.png", frames[:1], 8)
    half = np.repeat([0, 255], 12).astype(np.uint8)[None, None, :, None]
    write_video(folder / "mask.png", half * np.ones((1, 16, 1, 3), np.uint8), 8)
    return folder


@pytest.fixture
def asked(able_dir, room, tmp_path, monkeypatch):
    """asked(use, numbers): a copy of the able bundle, and what a command is told of so many videos."""
    monkeypatch.chdir(tmp_path)
    for name, number in (("NUM_DISTRIBUTED", 1), ("NUM_ROUNDS", 1), ("FEWEST_VIDEOS", 8)):
        monkeypatch.setattr(calibrate_cache, name, number)

    def line(kind, number):
        files = {
            name: str(room / file.format(number=number)) for name, file in GIVEN[kind].items() if type(file) is str
        }
        return {"prompt": f"a {number}", "seed": number} | GIVEN[kind] | files

    def asked(kind, numbers):
        file = tmp_path / f"{kind}_{len(numbers)}.jsonl"
        file.write_text("\n".join(json.dumps(line(kind, number)) for number in numbers))
        options = ["--prompt_file", str(file), "--num_steps", "6", "--num_frames", "9", "--cache_budget", "0.2"]
        return ["--checkpoint_path", str(bundle), "--device", "cpu", *options]

    bundle = shutil.copytree(able_dir, tmp_path / "bundle")
    return asked


@pytest.mark.parametrize("kind", GIVEN)
def test_a_plan_for_given_parts_keeps_its_budget(asked, capsys, kind):
    """On pictures that it was not calibrated with; and it is for these places alone."""
    assert calibrate_cache.main(asked(kind, range(8))) == 0
    told = capsys.readouterr().out
    (stored,) = Bundle.open("bundle", verify=True).manifest["cache"]
    assert 0 < len(stored["skipped"]) < 6 and 0 < stored["largest_error"] <= 0.85 * 0.2

    def latents(*more):
        words = [*asked(kind, [8, 9, 10]), "--format", "safetensors", "--video_save_path", "out", *more]
        assert generate(words) == 0, capsys.readouterr().err
        return torch.stack([load_file(path)["latents_CTHW"] for path in sorted(Path("out").glob("*.safetensors"))])

    errors = relative_errors(latents(), latents("--cache_budget", "0"))
    assert (errors > 0).all() and (errors <= 0.2).all()
    capsys.readouterr()
    assert calibrate_cache.check(asked(kind, [8, 9, 10])) == 0
    checked = capsys.readouterr().out
    assert checked.startswith(told.split(",")[0] + "; 3 of 3 videos") and f"largest {errors.max():.4f}" in checked
    other, common = next(each for each in GIVEN if each != kind), asked(kind, [8])
    for words in (asked(other, [8, 9, 10]), [*common[:4], *common[6:], "--prompt", "a"]):
        assert generate(words) == 2 and "was not calibrated for these settings" in capsys.readouterr().err


def test_places_of_a_calibration_are_alike(asked, capsys):
    words = asked("first_frame", range(8))
    assert calibrate_cache.main([*words, "--prompt", "a"]) == 2
    assert "in the same places for all videos" in capsys.readouterr().err


def test_windows_need_plans_before_any_is_made(asked, capsys):
    """Of the first, and of those that go on from one."""
    common = asked("first_frame", [0])
    alone = [*common[:4], *common[6:], "--prompt", *"abcdefgh"]
    assert calibrate_cache.main(alone) == 0
    long = [*alone, "--prompt", "a", "--total_frames", "17", "--video_save_path", "long.mp4"]
    assert generate(long) == 2
    assert "these settings and this con" in capsys.readouterr().err
    assert calibrate_cache.main(asked("first_frame", range(8))) == 0
    assert generate([*alone[:-8], "a", *long[-4:]]) == 0


def test_calibrating_again_replaces_the_plan(calibrated, tmp_path, monkeypatch):
    path = shutil.copytree(calibrated[0], tmp_path / "bundle")
    for name in ("NUM_DISTRIBUTED", "NUM_ROUNDS"):
        monkeypatch.setattr(calibrate_cache, name, 1)
    arguments = ["--checkpoint_path", str(path), "--num_steps", "8", "--device", "cpu", "--prompt", *"abcdefghijklmnop"]
    assert calibrate_cache.main([*arguments, "--cache_budget", "0.2"]) == 0
    assert calibrate_cache.main([*arguments, "--cache_budget", "0.1"]) == 0
    assert [one["budget"] for one in Bundle.open(path).manifest["cache"]] == [0.2, 0.1]


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (generate, ["--cache_budget", "0.02"], "was not calibrated for these settings; run: megadit calibrate-cache"),
        (generate, ["--cache_budget", "-1"], "cache_budget=-1 must lie between 0 and 1"),
        (generate, ["--cache_budget", "0.02", "--cache_measure", "lpips"], "was not calibrated for these settings"),
        (calibrate_cache.main, [], "give --cache_budget"),
        (calibrate_cache.main, ["--cache_budget", "0.02", "--cache_measure", "lpips"], "go together"),
        (
            calibrate_cache.main,
            [
                "--cache_budget",
                "0.02",
                "--cache_measure",
                "lpips",
                "--lpips_weights",
                ".",
                "--seeds",
                *map(str, range(16)),
            ],
            "holds 0 files alexnet",
        ),
        (calibrate_cache.main, ["--cache_budget", "0.02"], "1 videos are too few to calibrate with"),
        (calibrate_cache.main, ["--cache_budget", "0.02", "--guidances", "1", "2"], "one set of settings"),
        (calibrate_cache.check, ["--cache_budget", "0.02"], "was not calibrated for these settings"),
    ],
)
def test_mistakes(bundle_dir, tmp_path, monkeypatch, capsys, command, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert command(["--checkpoint_path", str(bundle_dir), "--prompt", "a", "--device", "cpu", *arguments]) == 2
    stderr = capsys.readouterr().err
    assert message in stderr and stderr.count("error: ") == 1
