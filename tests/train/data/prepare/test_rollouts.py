"""`megadit prepare rollouts`: a policy's videos, their scores and rewards; scorers that fail."""

import json
import multiprocessing
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load

from megadit.infer.evaluate.extractors import open_extractors
from megadit.infer.evaluate.metrics.motion import MotionClips
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.models.diffusion.noise import Stream, latent_noise, seed_key
from megadit.train.data.packs.samples import decode
from megadit.train.data.prepare import command as prepare
from megadit.train.data.prepare import prior, rollouts
from megadit.train.data.prepare import rewards as rewards_module
from megadit.train.data.prepare.rewards import diversity, rewards
from megadit.train.data.prepare.rollouts import SCORES_FILE
from megadit.train.dataset.dataset_info import DatasetInfo, iter_descriptions
from tests.train.data.prepare.test_prior import members, shards

SCORER = """
import os, time
BETTER = {"bright": "higher"}
started = time.time()
def score(video, prompt):
    if prompt == "hang" and video.mean() > 0:
        time.sleep(600)
    if prompt == "crash":
        os._exit(3)
    if prompt == "raise":
        raise ValueError("no")
    if prompt == "nan":
        return {"bright": float("nan")}
    return {"bright": 0.5 if prompt == "equal" else float(video.mean()), "dark": -float(video.mean())}
"""


@pytest.fixture
def make(bundle, tmp_path):
    (tmp_path / "scorer").mkdir()
    (tmp_path / "scorer" / "scorer.py").write_text(SCORER)

    def run(*more, prompts=("a dog", "a cat"), out="out", code=0):
        argv = ["rollouts", str(bundle), str(tmp_path / out), "--scorer_dir", str(tmp_path / "scorer")]
        assert prepare.main([*argv, "--prompt", *prompts, "--group_size", "3", "--scorer_seconds", "2", *more]) == code
        return tmp_path / out

    return run


def test_samples_have_rewards_relative_to_their_group(make):
    out = make("--reward", "bright=2", "dark=0.5")
    found = [*iter_descriptions(out, "train")]
    assert [each.caption for each in found] == ["a dog"] * 3 + ["a cat"] * 3
    scores = [json.loads(content)["scores"] for name, content in members(out).items() if name.endswith("json")]
    weighted = [2 * each["bright"] + 0.5 * each["dark"] for each in scores]
    assert [each.reward for each in found] == rewards(weighted, 3) and len({each.reward for each in found}) > 2
    told = json.loads((out / SCORES_FILE).read_text())
    assert told["videos"] == told["rewarded"] == 6 and told["score"] == pytest.approx(np.mean(weighted))
    crude = {name.partition(".")[2]: content for name, content in members(out).items() if "00000004" in name}
    assert decode(crude | {"__key__": "a", "__occurrence__": 0}).reward == found[4].reward


def test_failures_cost_their_videos_and_not_the_run(make, capfd):
    out = make(prompts=("a dog", "crash", "hang", "raise", "nan", "equal"))
    told = json.loads((out / SCORES_FILE).read_text())
    assert (told["videos"], told["rewarded"]) == (18, 6) and DatasetInfo.read(out).num_samples["train"] == 6
    assert {each.caption for each in iter_descriptions(out, "train")} == {"a dog", "equal"}
    said = capfd.readouterr().err
    assert said.count("has ended on a video of 'crash'") == 3 and said.count("took more than 2 s") == 3
    assert "ValueError: no" in said and "finite numbers" in said


def test_a_run_in_which_all_fail_ends_and_can_be_repeated(make, tmp_path, capfd):
    out = make(prompts=("crash",), code=2)
    assert "none of 3 videos has a reward: the scorers must return bright" in capfd.readouterr().err
    (tmp_path / "scorer" / "scorer.py").write_text(SCORER.replace("os._exit(3)", "pass"))
    assert make(prompts=("crash",)) == out


def test_a_finished_folder_starts_no_scorer_and_belongs_to_its_rewards(make, tmp_path, monkeypatch, capfd):
    expected = shards(make("--reward", "bright=1"))
    with monkeypatch.context() as patched:
        patched.setattr(rollouts, "VideoScores", None)
        assert shards(make("--reward", "bright=1")) == expected
    make("--reward", "bright=2", code=2)
    (tmp_path / "scorer" / "scorer.py").write_text(SCORER + "\n")
    make("--reward", "bright=1", code=2)
    assert capfd.readouterr().err.count("holds samples of another request") == 2
    assert shards(make("--reward", "bright=-1", "--overwrite")) != expected


def test_programs_end_where_a_later_one_cannot_start(make, tmp_path, capfd):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "scorer.py").write_text("raise ValueError('no weights')")
    make("--watch_dir", str(tmp_path / "broken"), code=2)
    assert "no weights" in capfd.readouterr().err and not multiprocessing.active_children()


def test_a_score_that_nobody_returns_ends_the_run_at_its_first_video(make, capfd):
    make("--reward", "bright=1", "train.num_threads=1", code=2)
    err = capfd.readouterr().err
    assert "--reward train.num_threads=...: there is no such score; known are bright, dark, diversity" in err
    assert "6/6" not in err


def test_diversity_rewards_what_differs_from_its_group(make):
    latents_NCTHW = torch.tensor([0.0, 0, 0, 3, 1, 1, 1, 1]).reshape(8, 1, 1, 1, 1)
    assert diversity(latents_NCTHW, 4) == pytest.approx([4 / 3, 4 / 3, 4 / 3, 4, 0, 0, 0, 0])
    out = make("--reward", "diversity=1")
    kept = json.loads((out / SCORES_FILE).read_text())
    assert kept["score"] == pytest.approx(1) and kept["rewarded"] == 6
    latents_NCTHW = torch.stack([load(content)["latent"] for name, content in members(out).items() if "safe" in name])
    expected = rewards(diversity(latents_NCTHW, 3), 3)
    assert [each.reward for each in iter_descriptions(out, "train")] == pytest.approx(expected)
    assert len({*expected}) > 2


def test_diversity_is_that_of_an_extractors_features(make, bundle, clip_folder):
    out = make("--reward", "diversity=1", "--extractors", str(clip_folder), "--num_video_frames", "5")
    (seer,) = open_extractors(clip_folder, torch.device("cpu"))
    settings = {"num_frames": 5, "seeds": list(range(6))}
    videos = TextToVideo.from_pretrained(bundle)(["a dog"] * 3 + ["a cat"] * 3, **settings)
    features_ND = torch.stack([seer(torch.from_numpy(each.video)[:, None]).mean(0) for each in videos])
    found = [each.reward for each in iter_descriptions(out, "train")]
    assert found == pytest.approx(rewards(diversity(features_ND, 3), 3), abs=1e-3)
    latents = [load(content)["latent"] for name, content in members(out).items() if "safe" in name]
    assert found != pytest.approx(rewards(diversity(latents, 3), 3), abs=1e-2), "those are others"
    assert all("features" not in json.loads(content) for name, content in members(out).items() if "json" in name)


def test_clip_and_optical_flow_are_rewarded_without_a_program(bundle, tmp_path, clip_folder, monkeypatch, capfd):
    ask = ["rollouts", str(bundle), "--prompt", "a dog", "--group_size", "3", "--num_video_frames", "5"]
    more = ["--reward", "clip=1", "motion=2", "flicker=-1"]
    assert prepare.main([*ask[:2], str(tmp_path / "out"), *ask[2:], *more, "--clip", str(clip_folder)]) == 0
    told = json.loads((tmp_path / "out" / SCORES_FILE).read_text())
    means = told["means"]
    assert told["rewarded"] == 3 and means["motion"] > 0 and 0 <= means["flicker"] <= 1
    assert told["score"] == pytest.approx(means["clip"] + 2 * means["motion"] - means["flicker"])
    for wrong, said in (
        (more, "--reward clip=... needs --clip DIR"),
        ([], "there is nothing to reward"),
        (["--reward", "motion=1", "--num_video_frames", "1"], "two frames or more"),
        ([*more, "--clip", str(bundle)], "makes videos"),
    ):
        assert prepare.main([*ask[:2], str(tmp_path / "other"), *ask[2:], *wrong]) == 2
        assert said in capfd.readouterr().err
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
    monkeypatch.setattr(rewards_module, "open_extractors", lambda *_: [MotionClips()])
    assert prepare.main([*ask[:2], str(tmp_path / "other"), *ask[2:], *more, "--clip", "flow"]) == 2
    assert "--clip flow: it embeds no texts" in capfd.readouterr().err


@pytest.mark.parametrize("moment", ["before any shard is changed", "after one"])
def test_an_interrupted_command_goes_on_to_the_same_bytes(make, monkeypatch, moment):
    monkeypatch.setattr(prior, "SHARD_SIZE", 4)
    expected = shards(make(out="whole"))
    written, write = [], rollouts.write_members

    def stop(path, members):
        if len(written) == (moment == "after one"):
            raise KeyboardInterrupt
        written.append(path)
        write(path, members)

    with monkeypatch.context() as patched:
        patched.setattr(rollouts, "write_members", stop)
        make(code=130)
    assert shards(make()) == expected


def test_rewards():
    assert rewards([1.0, 0.0, 1.0, 1.0], 2) == pytest.approx([1.0, 0.0, 0.5, 0.5])
    assert rewards([5.0] * 4, 2) == [0.5] * 4
    assert rewards([1.0, None, None, 3.0, 2.0, 1.0], 3) == [None, None, None, 1.0, 0.5, pytest.approx(0.0, abs=1e-9)]
    scores = np.random.default_rng(0).normal(size=(50, 8))
    found = np.reshape(rewards(scores.flatten().tolist(), 8), (50, 8))
    assert (found >= 0).all() and (found <= 1).all() and abs(found.mean() - 0.5) < 0.02
    assert (found.argsort(1) == scores.argsort(1)).mean() > 0.9


@pytest.mark.parametrize("weight", ["bright", "bright=much", "=1", "bright=nan"])
def test_a_weight_is_a_number(make, weight, capsys):
    assert not make("--reward", weight, code=2).exists()
    assert "write NAME=WEIGHT" in capsys.readouterr().err


def test_every_option_reaches_the_samples(make, tmp_path, monkeypatch, capfd):
    (tmp_path / "watched").mkdir()
    (tmp_path / "watched" / "scorer.py").write_text("def score(video, prompt):\n    return {'frames': len(video)}")
    (tmp_path / "prompts.txt").write_text("a bird\n")
    more = ("--prompt_file", str(tmp_path / "prompts.txt"), *"--seed 7 --batch_size 2 --num_video_frames 1".split())
    out = make(*more, "--watch_dir", str(tmp_path / "watched"), "--device", "cpu", "--dtype", "float32")
    assert json.loads((out / SCORES_FILE).read_text())["means"]["frames"] == 1
    found = [*iter_descriptions(out, "train")]
    assert len(found) == 9 and found[-1].caption == "a bird" and found[0].seed == 7 and found[0].num_frames == 1
    assert prepare.main(["rollouts", "x", str(out), "--prompt", "a"]) == 2
    assert "give --scorer_dir DIR" in capfd.readouterr().err
    asked = []
    monkeypatch.setattr(rollouts, "prepare_samples", lambda options, bundle, prior, finish: asked.append(prior))
    sampling = ["--sampler", "heun", "--num_steps", "5", "--guidance", "3", "--height", "24", "--width", "32"]
    sampling += ["--fps", "4", "--negative_prompt", "a fish", "--eta", "0", "--churn", "2", "--adapter", "mine"]
    make(*sampling, "--overwrite")
    (settings,) = (each.settings for each in asked)
    assert (settings.sampler, settings.num_steps, settings.guidance, settings.height) == ("heun", 5, 3, 24)
    assert (settings.width, settings.fps, settings.negative_prompt, settings.churn) == (32, 4, "a fish", 2)
    assert asked[0].adapters == {"mine": 1.0} and settings.eta == 0


STOCHASTIC = ("--sampler", "euler", "--eta", "1", "--churn", "0", "--guidance", "1", "--num_steps", "5")


def test_steps_from_kept_states_are_those_that_the_sampler_took(make, bundle):
    out = make(*STOCHASTIC, "--states", "4")
    pipeline = TextToVideo.from_pretrained(bundle)
    for name, content in members(out).items():
        if not name.endswith("json"):
            continue
        told, tensors = json.loads(content), load(members(out)[name.replace("json", "safetensors")])
        assert len(told["states"]) == len(tensors["states"]) == 4 and told["states"][0][1] > told["states"][3][1]
        key_B = torch.tensor([seed_key(told["seed"])])
        conditioning = pipeline.text_encoder.conditioning([told["caption"]], told["fps"])
        for (x, next_x), (index, sigma, down, up) in zip(pairwise(tensors["states"]), told["states"], strict=False):
            D = pipeline.denoiser(x[None], torch.tensor([sigma]), conditioning)[0]
            noise = latent_noise(key_B, tuple(x.shape), stream=Stream.STEP + index)[0]
            expected = x + (down - sigma) * (x - D) / sigma + up * noise
            torch.testing.assert_close(next_x, expected, rtol=1e-4, atol=1e-4 * sigma)
    crude = {name.partition(".")[2]: content for name, content in members(out).items() if "00000004" in name}
    drawn = {decode(crude | {"__key__": "a", "__occurrence__": epoch}).state.step.sigma for epoch in range(20)}
    assert drawn == {step[1] for step in json.loads(crude["json"])["states"]}, "each epoch draws another"
    assert shards(make(*STOCHASTIC, "--states", "4", out="again")) == shards(out)


def test_states_that_have_no_likelihood_are_refused(make, capfd):
    for wrong, said in (
        (("--eta", "0"), "states need --sampler euler --eta 1"),
        (("--sampler", "heun"), "states need --sampler euler"),
        (("--guidance", "2"), "--guidance 1"),
        (("--churn", "3"), "--churn 0"),
        (("--num_steps", "2"), "--states 4: 1 of 2 steps add noise"),
    ):
        make(*STOCHASTIC, "--states", "4", *wrong, code=2)
        assert said in capfd.readouterr().err
