"""`megadit distill`: its stages, the student's settings, killed and continued, collapsed, mistaken."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from megadit.infer.commands.tune_sampler import write_defaults
from megadit.infer.evaluate.videos import videos_in_memory
from megadit.infer.generate.command import main as generate
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.sampling.resolve import resolve_settings
from megadit.models.bundle import Bundle
from megadit.models.convert.adapters.files import bundle_fingerprint, read_adapter
from megadit.models.convert.merging.merge import merge_bundle
from megadit.models.diffusion.settings import SamplingSettings, check_guidance
from megadit.models.shared.errors import UserError
from megadit.train.config.load import resolve_config
from megadit.train.distill import command as distill
from megadit.train.distill.check import Bounds, Comparison, compare, spread, spread_within
from megadit.train.distill.command import main
from megadit.train.distill.stages import STAGES, embedded_scale, student_settings, student_sigmas
from tests.bundles import write_tiny_bundle
from tests.train.test_adapter_runs import write

BOUNDS = Bounds(least_spread=0.5, most_spread=2.0, most_distance=1.5)
FAST = ("train.train_iters=2", "train.num_threads=1", "checkpoint.save_interval=1", "logger.tensorboard=false")


@pytest.fixture(scope="module")
def trained(run_ranks, tiny_arguments, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    run_ranks(1, *tiny_arguments, "validation.interval=0", f"train.output_dir={out}")
    return out


@pytest.fixture(scope="module")
def teacher(trained, tmp_path_factory):
    from megadit.train.checkpoints.to_bundle import main as to_bundle

    path = tmp_path_factory.mktemp("teacher") / "bundle"
    assert to_bundle([str(trained), str(path)]) == 0
    return path


def command(teacher, data, out, *more):
    return [str(teacher), str(out), "--data", str(data), "--count", "8", "--device", "cpu", *FAST, *more]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_modules")
def test_stages_follow_one_another_and_go_on_where_they_were(teacher, tiny_dataset, tmp_path, capfd):
    told = command(teacher, tiny_dataset, tmp_path / "out", "--calls", "2", "--spread", "0.01", "100", "--nproc", "1")
    told += ["--num_trajectories", "6", "--trajectory_steps", "3"]
    assert main([*told, "regression.optimizer.lr=0.001", "data.num_workers=0"]) == 0
    student = Bundle.open(tmp_path / "out" / "bundle")
    assert student.defaults.sampler == "consistency" and student.defaults.guidance == 1
    assert student.defaults.sigmas == student_sigmas(Bundle.open(teacher), 2)
    first, second = (tmp_path / "out" / name for name in ("1_guidance", "2_regression"))
    assert "objective: guidance" in (first / "config.yaml").read_text()
    config = (second / "config.yaml").read_text()
    assert (
        "lr: 0.001" in config
        and f"path: {tmp_path / 'out' / 'pairs' / 'dataset'}" in config
        and f"teacher: {first / 'bundle'}" in config
    )
    assert json.loads((second / "comparison.json").read_text())["count"] == 16
    (video,) = TextToVideo.from_pretrained(student, device="cpu")(["sample number 3"])
    assert video.settings.num_steps == 2

    asked = json.loads((tmp_path / "out" / "pairs" / "dataset" / "trajectories.json").read_text())
    assert (asked["count"], asked["settings"]["num_steps"], asked["settings"]["sampler"]) == (6, 3, "euler")
    shutil.rmtree(tmp_path / "out" / "bundle")
    shutil.rmtree(second / "bundle")
    capfd.readouterr()
    assert main([*told, "regression.optimizer.lr=0.001", "data.num_workers=0"]) == 0
    said = capfd.readouterr().out
    assert "all steps are done in" in said and "step 1/2" not in said, "nothing is trained again"
    again = Bundle.open(tmp_path / "out" / "bundle")
    assert again.manifest["fingerprints"] == student.manifest["fingerprints"]
    assert main([*told, "regression.optimizer.lr=0.001", "data.num_workers=0", "--noise_scale", "0.7"]) == 0
    called = Bundle.open(tmp_path / "out" / "bundle")
    assert called.manifest["fingerprints"] == student.manifest["fingerprints"]
    assert called.defaults == replace(student.defaults, noise_scale=0.7)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_modules")
def test_stages_of_adapters_leave_an_adapter_that_says_how_it_is_called(teacher, tiny_dataset, tmp_path, capfd):
    """Beside the first teacher's weights, whichever stage; with it `generate` and `bundle --merge` do what the student
    was measured with."""
    out = tmp_path / "out"
    told = command(teacher, tiny_dataset, out, "--calls", "2", "--spread", "0.01", "100", "--num_trajectories", "6")
    told += ["--trajectory_steps", "3", "--adapter_rank", "2", "data.num_workers=0", "train.adapter.alpha=4"]
    assert main(told) == 0
    said = capfd.readouterr().out
    assert f"--adapter {out / 'adapter'}" in said and not (out / "bundle").exists()
    first, last = read_adapter(out / "1_guidance" / "adapter"), read_adapter(out / "adapter")
    changed = [name for name in last.changes if not torch.equal(last.changes[name].up_OR, first.changes[name].up_OR)]
    assert first.base == last.base == bundle_fingerprint(Bundle.open(teacher)) and changed
    second = resolve_config(config_file=out / "2_regression" / "config.yaml").train
    assert second.distill.teacher == str(teacher) and second.adapter.rank == 2 and second.adapter.alpha == 4
    assert second.distill.teacher_adapter == str(out / "1_guidance" / "adapter")

    assert main([*told, "--noise_scale", "0.7"]) == 0
    surer = read_adapter(out / "adapter")
    assert surer.defaults == {**last.defaults, "noise_scale": 0.7} and last.defaults["noise_scale"] == 1
    assert all(torch.equal(surer.changes[name].up_OR, last.changes[name].up_OR) for name in changed)

    sigmas = student_sigmas(Bundle.open(teacher), 2)
    adapters = {str(out / "adapter"): 1.0}
    (video,) = TextToVideo.from_pretrained(teacher, device="cpu")(["sample number 3"], adapters=adapters)
    settings = video.settings
    assert (settings.sampler, settings.sigmas, settings.num_steps, settings.guidance) == ("consistency", sigmas, 2, 1)
    merge_bundle(Bundle.open(teacher), adapters, tmp_path / "merged")
    merged = Bundle.open(tmp_path / "merged")
    assert merged.defaults == settings
    (alone,) = TextToVideo.from_pretrained(merged, device="cpu")(["sample number 3"])
    torch.testing.assert_close(alone.latents_CTHW, video.latents_CTHW, rtol=1e-4, atol=1e-5)
    made = ["--checkpoint_path", str(teacher), "--adapter", str(out / "adapter"), "--prompt", "sample number 3"]
    assert generate([*made, "--device", "cpu", "--video_save_path", str(tmp_path / "made.safetensors")]) == 0
    assert torch.equal(load_file(tmp_path / "made.safetensors")["latents_CTHW"], video.latents_CTHW)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_modules")
def test_a_collapsed_student_ends_it_and_the_one_before_is_kept(teacher, tiny_dataset, tmp_path, capfd):
    told = command(teacher, tiny_dataset, tmp_path / "out", "data.num_workers=0")
    assert main([*told, "--spread", "0.01", "100", "--stages", "guidance"]) == 0
    kept = Bundle.open(tmp_path / "out" / "bundle").manifest
    assert main([*told, "--stages", "guidance", "progressive", "--spread", "0.01", "0.02"]) == 2
    said = capfd.readouterr().err
    assert "the student has collapsed: its diversity is not within 0.01 to 0.02 times" in said
    assert Bundle.open(tmp_path / "out" / "bundle").manifest == kept


def test_the_levels_of_a_student(tmp_path):
    teacher = Bundle.open(write(tmp_path / "bundle", 0))
    assert student_sigmas(teacher, 1) == (80.0,)
    four = student_sigmas(teacher, 4)
    assert len(four) == 4 and four[0] == 80 and list(four) == sorted(four, reverse=True)
    with_others = replace(teacher.defaults, image_guidance=1.5, cache_budget=0.1, eta=0.5)
    settings = resolve_settings(with_others, **student_settings("consistency", four))
    assert (settings.image_guidance, settings.cache_budget, settings.eta) == (1, 0, 0), "each would cost calls, or take"
    assert (settings.guidance, settings.num_steps, settings.num_frames) == (1, 4, teacher.defaults.num_frames)
    with_prompts = replace(teacher.defaults, negative_prompt="grey", second_prompt="two", second_guidance=2.0)
    for told, scale in (((1.0, 5.0), 3.0), ((4.0, 6.0), 4.0), ((1.0, 2.0), 2.0)):
        settings = resolve_settings(
            with_prompts, **student_settings("consistency", four, embedded_scale(teacher.defaults, told))
        )
        check_guidance(settings, told)
        assert (settings.guidance, settings.negative_prompt, settings.second_prompt) == (scale, "", "")
    assert isinstance(settings, SamplingSettings)


def test_spread_is_that_of_one_prompts_videos():
    generator = torch.Generator().manual_seed(0)
    of_prompts = 100 * torch.randn(500, 1, 3, generator=generator)
    noisy = [of_prompts + 2 * torch.randn(500, 1, 3, generator=generator) for _ in range(2)]
    assert spread(torch.cat(noisy)) == pytest.approx(3 * 4, rel=0.1)
    assert spread(torch.cat([of_prompts, of_prompts])) == 0
    with pytest.raises(UserError, match="3 videos are not two of each prompt"):
        spread(torch.zeros(3, 1, 2))


def test_the_spread_within_groups_is_that_of_their_members_and_not_of_their_means():
    generator, group = torch.Generator().manual_seed(0), torch.arange(4000) % 4
    features = torch.randn(4000, 1, 3, generator=generator) * 2 + 100 * group[:, None, None]
    assert spread_within(features, group) == pytest.approx(3 * 4, rel=0.1)
    collapsed = 100.0 * group[:, None, None].expand(-1, 1, 3)
    assert spread_within(collapsed, group) == 0 and spread_within(collapsed, group % 2) > 1000


class OfOne:
    """Makes for every prompt the same video, whatever the seed."""

    def __init__(self, bundle, **settings):
        self.bundle, self.defaults = bundle, bundle.defaults

    def about(self, settings):
        return {"model": str(self.bundle.path)}

    def check(self, settings):
        pass

    def videos(self, prompts, seeds, settings):
        for prompt, seed in zip(prompts, seeds, strict=True):
            number = sum(prompt.encode()) if "student" in str(self.bundle.path) else [sum(prompt.encode()), seed]
            yield np.random.default_rng(number).integers(0, 255, (3, 8, 8, 3), dtype=np.uint8)


def test_a_collapse_that_no_judge_of_prompts_sees_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("megadit.train.distill.check.BundleMaker", OfOne)
    bundles = [Bundle.open(write(tmp_path / name / "bundle", 0)) for name in ("teacher", "student", "teacher2")]
    prompts = [f"prompt {number}" for number in range(9)]
    collapsed = compare(tmp_path / "check", bundles[0], bundles[1], prompts)
    alike = compare(tmp_path / "check2", bundles[0], bundles[2], prompts)
    assert collapsed.spread == 0 and "its diversity is not within 0.5 to 2" in collapsed.fault(BOUNDS)
    assert alike.spread == 1 and alike.fault(BOUNDS) is None and alike.distance is None
    far = Comparison(spread=1.0, distance=1.6, moved=0.1, seen_by="a judge", count=8)
    assert "its distance from real videos is more than 1.5" in far.fault(BOUNDS)
    assert videos_in_memory("", np.zeros((1, 1, 2, 2, 3), np.uint8), ["a"], 8.0).count == 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--stages", "guidence"], "--stages guidence is unknown; did you mean 'guidance'"),
        (["--sigmas", "80", "2", "--calls", "4"], "--sigmas needs as many noise levels as --calls"),
        (
            ["--guidance", "2", "--guidance_embedding_range", "1", "4"],
            "give --guidance or --guidance_embedding_range, not both",
        ),
        (
            ["--recipe", "digits_tiny", "--guidance_embedding_range", "4", "1"],
            "must be two scales from 1, the lower first",
        ),
        (
            ["--recipe", "digits_tiny", "--calls", "2", "--guidance_embedding_range", "1", "4"],
            "train.distill.objective=regression learns from videos of one guidance scale",
        ),
        (["--calls", "0"], "--calls=0 must lie between 1 and 64"),
        (["consistency.optimizer.lr=9"], "a stage that is not run; the stages are: guidance"),
        (["train.adapter.alpha=4"], "give --adapter_rank N to have adapters"),
        (["--adapter_rank", "4", "guidance.train.adapter.alpha=4"], "set train.adapter.* for all stages"),
        (["--adapter_rank", "4", "checkpoint.init_from=elsewhere"], "leave out checkpoint.init_from"),
        (["--recipe", "digits_tiny", "--adapter_rank", "4", "model.parameterization=flow"], "leave out model.*"),
        (
            ["--recipe", "digits_tiny", "--adapter_rank", "4", "--guidance_embedding_range", "1", "4"],
            "and --guidance_embedding_range",
        ),
        (
            ["--recipe", "digits_tiny", "model.guidance_embedding_range=[1,4]"],
            "give --guidance_embedding_range, not model.guidance_embedding_range",
        ),
        (["--recipe", "digits_tiny", "--adapter_rank", "0"], "--adapter_rank=0 must be at least 1"),
        ([], "does not say which recipe made it: give --recipe NAME"),
        (["--recipe", "digits_tiny"], "give --data FOLDER, or --prompts FILE"),
        (["--recipe", "digits_tiny", "--calls", "2", "regression.data.encode=on_the_fly"], "and use latents"),
        (["--recipe", "digits_tiny", "--calls", "2", "regression.data.seq_len=9"], "unknown key data.seq_len"),
        (["--recipe", "digits_tiny", "--nproc", "2", "data.global_batch_size=1"], "data.global_batch_size"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_trained(tmp_path, capsys, more, says):
    bundle = write(tmp_path / "bundle", 0)
    assert main([str(bundle), str(tmp_path / "out"), *more]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--guidance", "3"], "the teacher is guidance-distilled, and so are its students: leave out --guidance"),
        (["--guidance_embedding_range", "1", "9"], "model.guidance_embedding_range=[1,9] exceeds "),
        (
            ["--adapter_rank", "4", "--guidance_embedding_range", "1", "2"],
            "an adapter needs the teacher's network as it is",
        ),
        (["--calls", "2"], "train.distill.objective=regression learns from videos of one guidance scale"),
    ],
)
def test_what_a_told_teacher_cannot_teach_is_one_line(tmp_path, capsys, more, says):
    bundle = write(tmp_path / "bundle", 0, guidance_embedding_range=(1.0, 4.5678912))
    assert main([str(bundle), str(tmp_path / "out"), "--recipe", "digits_tiny", *more]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [[], ["--adapter_rank", "4"], ["--guidance_embedding_range", "1.25", "4.0000001"]])
def test_students_of_a_told_teacher_are_told(tmp_path, monkeypatch, capsys, more):
    bundle, asked = Bundle.open(write(tmp_path / "bundle", 0, guidance_embedding_range=(1.0, 4.5678912))), []
    (tmp_path / "prompts.txt").write_text("a cat")

    def run_module(module, *arguments):
        asked.append(resolve_config(arguments[1], overrides=list(arguments[2:])))
        raise UserError("this far")

    monkeypatch.setattr("megadit.train.distill.command.run_module", run_module)
    monkeypatch.setattr("megadit.train.distill.runs.run_module", run_module)
    given = ["--recipe", "digits_tiny", "--prompts", str(tmp_path / "prompts.txt"), *more]
    assert main([str(bundle.path), str(tmp_path / "out"), *given]) == 2
    assert "this far" in capsys.readouterr().err
    told = (1.25, 4.0000001) if "--guidance_embedding_range" in more else bundle.config.guidance_embedding_range
    assert (
        asked[0].model == replace(bundle.config, guidance_embedding_range=told) and asked[0].train.distill.guidance == 1
    )
    assert (asked[0].train.adapter is not None) == ("--adapter_rank" in more)


def test_every_objective_has_a_stage():
    from megadit.train.objectives.registry import OF_STUDENTS

    of_judged_videos = {"diffusion_nft", "dpo", "flow_grpo"}
    assert STAGES.keys() == OF_STUDENTS.keys() - of_judged_videos


OF_SAMPLES = {
    "conditioning": ("[first_frame:0.5]", ()),
    "encode": ("on_the_fly", "precached"),
    "min_aesthetic_score": ("5.0", None),
    "max_frames": ("1", None),
    "keep": ("[image:0.5]", ()),
    "path": ("clips", "pairs"),
}
"""Settings of `data`: what the samples ask for, what pairs are read with."""


@pytest.mark.parametrize("is_in_file", [True, False])
def test_what_samples_ask_for_is_not_asked_of_pairs(tmp_path, monkeypatch, is_in_file):
    bundle, asked = write(tmp_path / "teacher", 0, conditioning_sigma=0.02), []

    def run_module(module, *arguments):
        if module == "megadit.train":
            start = 4 if "--config-file" in arguments else 2
            file = arguments[3] if start == 4 else None
            asked.append(resolve_config(arguments[1], config_file=file, overrides=list(arguments[start:])))
        else:
            shutil.copytree(bundle, arguments[1], dirs_exist_ok=True)

    monkeypatch.setattr("megadit.train.distill.command.run_module", run_module)
    monkeypatch.setattr("megadit.train.distill.runs.run_module", run_module)
    found = Comparison(spread=1.0, distance=None, moved=0.1, seen_by="", count=4)
    monkeypatch.setattr("megadit.train.distill.command.compare", lambda *_, **__: found)
    (tmp_path / "prompts.txt").write_text("a cat")
    values = [f"data.{name}={value}" for name, (value, _) in OF_SAMPLES.items()]
    if is_in_file:
        (tmp_path / "run.yaml").write_text(
            OmegaConf.to_yaml(OmegaConf.from_dotlist([*values, "model.conditioning_sigma=0.02"]))
        )
        values = ["--config-file", str(tmp_path / "run.yaml")]
    more = ["--recipe", "digits_tiny", "--calls", "2", "--prompts", str(tmp_path / "prompts.txt"), "--pairs", "pairs"]
    assert main([str(bundle), str(tmp_path / "out"), *more, *values]) == 0
    of_samples, of_pairs = (run.data for run in asked)
    for name, (value, read) in OF_SAMPLES.items():
        assert getattr(of_pairs, name) == read, name
        assert getattr(of_samples, name) == getattr(resolve_config("digits_tiny", overrides=[
            "model.conditioning_sigma=0.02", f"data.{name}={value}"]).data, name), name  # fmt: skip


def test_every_option_reaches_its_part(tmp_path, monkeypatch):
    bundle, asked, compared = write(tmp_path / "teacher", 0), [], []
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    (tmp_path / "changes.yaml").write_text("data: {text_seq_length: 96}")

    def run_module(module, *arguments):
        asked.append((module, arguments))
        if module == "megadit.train.checkpoints.to_bundle":
            shutil.copytree(bundle, arguments[1], dirs_exist_ok=True)

    def found(folder, teacher, student, prompts, **given):
        compared.append((prompts, given))
        return Comparison(spread=1.6, distance=1.3, moved=0.1, seen_by="a judge", count=4)

    monkeypatch.setattr("megadit.train.distill.command.run_module", run_module)
    monkeypatch.setattr("megadit.train.distill.runs.run_module", run_module)
    monkeypatch.setattr("megadit.train.distill.command.compare", found)
    monkeypatch.setattr("megadit.train.distill.command.open_extractors", lambda path, device: [path])
    monkeypatch.setattr("megadit.train.distill.command.open_videos", lambda path, count: path)
    more = ["--data", "clips", "--recipe", "digits", "--config-file", str(tmp_path / "changes.yaml"), "--nproc", "2"]
    more += ["--calls", "3", "--sigmas", "70", "3", "1", "--guidance", "5", "--stages", "consistency"]
    more += ["--prompts", str(tmp_path / "prompts.txt"), "--count", "8", "--extractors", "judge", "--device", "cpu"]
    more += ["--noise_scale", "0.8"]
    out = tmp_path / "out"
    assert main([str(bundle), str(out), "consistency.optimizer.lr=9", *more, "--spread", "0.5", "1.7"]) == 0
    module, arguments = asked[0]
    assert module == "megadit.train" and arguments[:4] == ("--recipe", "digits", "--config-file", more[5])
    assert {"--nproc", "2", "data.path=clips", "train.distill.guidance=5", "optimizer.lr=9"} <= {*arguments}
    assert "train.distill.objective=consistency" in arguments and "model.num_layers=2" in arguments
    settings = Bundle.open(out / "bundle").defaults
    assert (settings.sigmas, settings.noise_scale) == ((70, 3, 1), 0.8)
    prompts, given = compared[0]
    assert len(prompts) == 8 and set(prompts) == {"a cat", "a dog"}
    assert given["device"] == "cpu" and [str(each) for each in given["extractors"]] == ["judge"]
    shutil.rmtree(out)
    assert main([str(bundle), str(out), *more, "--spread", "0.5", "1.5"]) == 2
    shutil.rmtree(out)
    assert main([str(bundle), str(out), *more, "--spread", "0.5", "1.7", "--distance", "1.2"]) == 2
    assert not (out / "bundle").exists()
    shutil.rmtree(out)
    told = [
        "--recipe",
        "digits",
        "--prompts",
        more[more.index("--prompts") + 1],
        "--guidance_embedding_range",
        "1",
        "2.5",
    ]
    assert main([str(bundle), str(out), *told, "--stages", "guidance", "continuous_consistency"]) == 0
    with_guidance_embedding = {
        "model.guidance_embedding_range=[1.0,2.5]",
        "train.distill.guidance=1",
        "validation.sampling.guidance=2.5",
    }
    assert all(with_guidance_embedding <= {*arguments} for module, arguments in asked[-4:] if module == "megadit.train")
    runs = [resolve_config(arguments[1], overrides=list(arguments[2:])) for _, arguments in asked[-4::2]]
    assert [run.train.distill.objective for run in runs] == ["guidance", "continuous_consistency"]
    assert [run.diffusion.learned_uncertainty for run in runs] == [False, True]
    assert runs[1].train.distill.teacher == str(out / "1_guidance" / "bundle")
    settings = Bundle.open(out / "bundle").defaults
    assert (settings.guidance, settings.sampler, settings.noise_scale) == (2.5, "consistency", 1)
    shutil.rmtree(out)
    write_defaults(Bundle.open(bundle), replace(Bundle.open(bundle).defaults, noise_scale=0.6))
    assert main([str(bundle), str(out), *told, "--stages", "guidance"]) == 0
    assert Bundle.open(out / "bundle").defaults.noise_scale == 0.6, "the teacher's own, where nothing is said"
    shutil.rmtree(out)
    monkeypatch.setattr("megadit.train.distill.pairs.launch", lambda *request, **ranks: made.append((request, ranks)))
    of_pairs = ["--recipe", "digits", "--prompts", more[more.index("--prompts") + 1], "--stages", "regression"]
    made, steps = [], ["--num_trajectories", "5", "--trajectory_steps", "3", "--nproc", "2"]
    assert main([str(bundle), str(out), *of_pairs, *steps, "--guidance", "4"]) == 0
    ((module, request), ranks) = made[0]
    assert (
        module == "megadit.train.data.prepare.command"
        and ranks == {"num_processes": 2}
        and request[0] == "trajectories"
    )
    told = dict(zip(request[3::2], request[4::2], strict=True))
    assert (told["--count"], told["--num_steps"], told["--guidance"], told["--eta"]) == ("5", "3", "4", "0")
    assert {"a cat", "a dog"} == {json.loads(line)["prompt"] for line in Path(told["--prompt_file"]).open()}
    assert f"data.path={out / 'pairs' / 'dataset'}" in asked[-2][1]
    shutil.rmtree(out)
    assert main([str(bundle), str(out), *of_pairs, "--pairs", "elsewhere"]) == 0
    assert len(made) == 1 and "data.path=elsewhere" in asked[-2][1]


def test_a_stage_that_cannot_fit_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megadit.train.distill.runs.this_machines_memory", lambda ranks: 1e5)
    monkeypatch.setattr(distill, "_check", lambda *_: sys.exit("all is checked"))
    teacher = write_tiny_bundle(tmp_path / "teacher")
    told = [str(teacher.path), str(tmp_path / "out"), "--data", "nowhere", "--recipe", "digits_tiny"]
    assert main(told) == 2
    error = capsys.readouterr().err
    assert "1_guidance, with its teacher, needs about" in error and "--adapter_rank" in error
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match="all is checked"):
        main([*told, "--even_if_too_large"])
