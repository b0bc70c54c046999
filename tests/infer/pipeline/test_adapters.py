"""Adapters while sampling: several to a batch, at noise levels, merged, loaded and dropped; what is refused."""

import gc
import json
import shutil
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from megadit.infer.generate.command import main
from megadit.infer.inspect.info import describe
from megadit.infer.pipeline import adapters as adapter_cache
from megadit.infer.pipeline.pipeline import TextToVideo
from megadit.infer.runtimes.torch import AdaptableDenoiser
from megadit.infer.sampling.resolve import resolve_settings
from megadit.models.bundle import Bundle
from megadit.models.bundle_writer import write_bundle
from megadit.models.commands.convert import main as convert
from megadit.models.commands.push_pull import pull_bundle, push_bundle
from megadit.models.convert.adapters.files import bundle_fingerprint, read_adapter, write_adapter
from megadit.models.convert.merging.merge import merge_bundle
from megadit.models.lora.adapters import adapter_names
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import record_path, sha256_of, write_json
from megadit.models.storage.tensor_source import from_state_dict
from megadit.models.text_encoders.image_encoder import ImageEncoder
from megadit.train.checkpoints.to_bundle import main as bundle_command
from tests.bundles import random_dit

from ..conftest import make_adapter

PROMPTS, SEEDS = ["a red seven", "a blue two", "waves"], [3, 4, 5]
TOLERANCE = 1e-5
"""Relative, float32: other sizes of a batch add up in another order."""


@pytest.fixture(scope="module")
def one(bundle_dir, tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("adapters") / "one", bundle_dir, 1)


@pytest.fixture(scope="module")
def two(bundle_dir, tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("adapters") / "two", bundle_dir, 2, kind="dora", rank=3)


def latents(pipeline, prompts=PROMPTS, seeds=SEEDS, **options):
    return torch.stack([video.latents_CTHW for video in pipeline(prompts, seeds=seeds, **options)])


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


def test_several_in_one_batch_equal_each_alone(pipeline, one, two):
    asked = [{one: 0.8}, {two: 0.5}, {one: -0.3, two: 1.0}]
    together = latents(pipeline, adapters=asked, second_prompt="moving left", second_guidance=1.5)
    for number, adapters in enumerate(asked):
        alone = latents(
            pipeline,
            PROMPTS[number : number + 1],
            SEEDS[number : number + 1],
            adapters=adapters,
            second_prompt="moving left",
            second_guidance=1.5,
        )
        assert distance(together[number], alone[0]) <= TOLERANCE
    swapped = latents(pipeline, adapters=asked[::-1], second_prompt="moving left", second_guidance=1.5)
    assert all(distance(swapped[number], together[number]) > 0.01 for number in (0, 2)), "negative control"


def test_scaled_by_zero_and_taken_away_is_the_base_bit_for_bit(bundle_dir, one, two):
    fresh = TextToVideo.from_pretrained(bundle_dir, device="cpu")
    base = latents(fresh)
    assert not torch.equal(latents(fresh, adapters={one: 1.0, two: 1.0}), base)
    assert torch.equal(latents(fresh, adapters={one: 0.0, two: 0.0}), base)
    assert torch.equal(latents(fresh), base)
    others = latents(fresh, adapters=[{}, {one: 1.0}, {}])
    assert distance(others[0], base[0]) <= TOLERANCE and distance(others[1], base[1]) > 0.01


def test_an_interval_of_noise_levels(pipeline, one):
    base, always = latents(pipeline), latents(pipeline, adapters={one: 1.0})
    assert torch.equal(latents(pipeline, adapters={one: 1.0}, adapter_interval=(0.0, 1e3)), always)
    assert torch.equal(latents(pipeline, adapters={one: 1.0}, adapter_interval=(200.0, 300.0)), base)
    some = latents(pipeline, adapters={one: 1.0}, adapter_interval=(0.5, 10.0))
    assert distance(some, base) > 0.01 and distance(some, always) > 0.01
    with pytest.raises(UserError, match="adapter_interval"):
        latents(pipeline, adapters={one: 1.0}, adapter_interval=(3.0, 1.0))


def test_merged_equals_unmerged(pipeline, bundle_dir, one, two, tmp_path, capsys):
    before = (bundle_dir / "transformer" / "model.safetensors").read_bytes()
    merged = [str(bundle_dir), str(tmp_path / "merged"), "--merge", f"{one}:0.8", "--merge", f"{two}:0.5"]
    assert bundle_command(merged) == 0, capsys.readouterr().err
    found = latents(TextToVideo.from_pretrained(tmp_path / "merged", device="cpu"))
    expected = latents(pipeline, adapters={one: 0.8, two: 0.5})
    assert distance(found, expected) <= TOLERANCE, "three steps of guided sampling"
    assert distance(found, latents(pipeline)) > 0.01, "negative control"
    bundle = Bundle.open(tmp_path / "merged", verify=True)
    merged = [{"scale": 0.8, "step": 1}, {"scale": 0.5, "step": 2}]
    assert bundle.manifest["training"] == {"step": 7, "merged": merged}
    assert (bundle_dir / "transformer" / "model.safetensors").read_bytes() == before
    with pytest.raises(UserError, match="give another directory"):
        merge_bundle(Bundle.open(bundle_dir), {one: 1.0}, bundle_dir)


def like(bundle_dir, out, *, image_encoder=None, **changes):
    """A random bundle with the parts of another."""
    bundle = Bundle.open(bundle_dir)
    config = replace(bundle.config, **changes)
    state = random_dit(config).state_dict()
    parts = {"tokenizer": bundle.load_tokenizer(), "text_encoder": bundle.load_text_encoder()}
    write_bundle(out, config=config, state_dict=state, defaults=bundle.defaults, image_encoder=image_encoder, **parts)
    return out


def test_merged_keeps_what_reads_images(bundle_dir, tmp_path):
    write_json(tmp_path / "clip" / "config.json", {"model_type": "clip_vision_model", "hidden_size": 8})
    clip, wan = (
        ImageEncoder(model=str(tmp_path / "clip")),
        {"family": "wan", "parameterization": "flow", "image_size": 8},
    )
    base = like(bundle_dir, tmp_path / "base", image_encoder=clip, **wan)
    adapter = make_adapter(tmp_path / "adapter", base, 1, patterns=("blocks.*",))
    merge_bundle(Bundle.open(base), {adapter: 1.0}, tmp_path / "merged")
    assert Bundle.open(tmp_path / "merged").load_image_encoder().model == clip.model


def test_what_an_adapter_is_made_for_stands_where_nothing_else_is_asked(bundle_dir, one, tmp_path, capsys):
    """A student's: by generate, from Python, in a merged bundle; a scale of 0 is the base, and --repeat repeats."""
    base, asked = (
        Bundle.open(bundle_dir),
        {"sampler": "consistency", "sigmas": [9.0, 0.5], "num_steps": 2, "guidance": 1.0},
    )
    student = write_student(tmp_path / "student", one, asked)
    settings = resolve_settings(base.defaults, **asked)
    assert read_adapter(student).defaults == asked and settings.sigmas == (9.0, 0.5)
    made = ["--checkpoint_path", str(bundle_dir), "--prompt", "a", "--device", "cpu", "--video_save_path"]
    for name, more, expected in (
        ("plain", [], settings),
        ("asked", ["--num_steps", "3"], resolve_settings(settings, num_steps=3)),
        ("base", ["--adapter", f"{student}:0"], base.defaults),
    ):
        path = tmp_path / f"{name}.safetensors"
        assert main([*made, str(path), *(more if "--adapter" in more else ["--adapter", student, *more])]) == 0
        record = json.loads(path.with_name(f"{path.name}.json").read_text())
        assert record["sampler"] == expected.sampler and tuple(record["sigmas"]) == expected.sigmas, name
        assert record["num_steps"] == expected.num_steps and record["guidance"] == expected.guidance, name
    again = [
        "--repeat",
        str(tmp_path / "asked.safetensors"),
        "--recorded_files",
        "--device",
        "cpu",
        "--video_save_path",
    ]
    assert main([*again, str(tmp_path / "again.safetensors")]) == 0
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "asked.safetensors").read_bytes()

    pipeline = TextToVideo.from_pretrained(bundle_dir, device="cpu")
    assert pipeline(["a", "b"], adapters={student: 1.0})[1].settings == settings
    assert next(pipeline.stream(["a"], adapters={student: 1.0})).settings == settings
    assert pipeline(["a", "b"], adapters=[{student: 1.0}, {}])[0].settings == base.defaults, "one has no adapter"
    merge_bundle(base, {student: 0.5}, tmp_path / "merged")
    assert Bundle.open(tmp_path / "merged").defaults == settings
    other = write_student(tmp_path / "other", one, asked | {"num_steps": 2, "sigmas": [5.0, 0.5]})
    capsys.readouterr()
    assert main([*made, str(tmp_path / "x"), "--adapter", student, "--adapter", other]) == 2
    assert "need different sampling settings" in capsys.readouterr().err
    wrong = write_student(tmp_path / "wrong", one, {"num_stepz": 2})
    assert main([*made, str(tmp_path / "x"), "--adapter", wrong]) == 2
    assert "'num_stepz' is unknown; did you mean 'num_steps'" in capsys.readouterr().err


def write_student(path, adapter, asked):
    """The same adapter, made for settings of its own."""
    write_adapter(path, replace(read_adapter(adapter), defaults=asked))
    return str(path)


@pytest.fixture(scope="module")
def pair_dir(bundle_dir, tmp_path_factory):
    """Both networks are that of `bundle_dir`."""
    bundle, out = Bundle.open(bundle_dir), tmp_path_factory.mktemp("pair") / "pair"
    state = bundle.load_network().state_dict()
    parts = {"tokenizer": bundle.load_tokenizer(), "text_encoder": bundle.load_text_encoder()}
    second = {"low_noise": from_state_dict(state), "boundary": 0.875}
    write_bundle(out, config=bundle.config, state_dict=state, defaults=bundle.defaults, **parts, **second)
    return out


def test_two_networks_have_adapters_of_their_own(pair_dir, bundle_dir, one, two):
    """Above the boundary one, below it the other, and one for both: each as the network by itself."""
    pair, alone = (TextToVideo.from_pretrained(path, device="cpu") for path in (pair_dir, bundle_dir))
    above, below = {"sigmas": (9.0, 8.0)}, {"sigmas": (2.0, 1.0)}
    asked = {"num_steps": 2, "guidance": 1.0, "sampler": "euler"}
    for scales, at_high, at_low in (
        ({f"high={one}": 1.0, f"low={two}": 0.5}, {one: 1.0}, {two: 0.5}),
        ({f"low={one}": 1.0}, {}, {one: 1.0}),
        ({one: 0.7}, {one: 0.7}, {one: 0.7}),
    ):
        for levels, expected in ((above, at_high), (below, at_low)):
            found, like_alone = latents(pair, adapters=scales, **asked | levels), latents(
                alone, adapters=expected, **asked | levels
            )  # fmt: skip
            assert torch.equal(found, like_alone), (scales, levels)
    assert not torch.equal(latents(pair, **asked | above), latents(pair, adapters={one: 1.0}, **asked | above))


def test_a_merged_pair_is_the_same_two_networks(pair_dir, one, two, tmp_path):
    scales = {f"high={one}": 0.8, f"low={two}": 0.5}
    readings = merge_bundle(Bundle.open(pair_dir), scales, tmp_path / "merged")
    assert readings.keys() == scales.keys() and Bundle.open(tmp_path / "merged").boundary == pytest.approx(7.0)
    merged, plain = (TextToVideo.from_pretrained(path, device="cpu") for path in (tmp_path / "merged", pair_dir))
    asked = {"num_steps": 3, "guidance": 1.0, "sampler": "euler", "sigmas": (9.0, 2.0, 1.0)}
    assert distance(latents(merged, **asked), latents(plain, adapters=scales, **asked)) <= 1e-5
    assert distance(latents(merged, **asked), latents(plain, adapters={one: 0.8, two: 0.5}, **asked)) > 1e-3


def test_generate_with_adapters_of_two_networks_and_again(pair_dir, bundle_dir, one, two, tmp_path, capsys):
    made, again = tmp_path / "made.safetensors", tmp_path / "again.safetensors"
    asked = ["--prompt", "a", "--device", "cpu", "--num_steps", "2", "--adapter", f"high={one}:0.5"]
    command = ["--checkpoint_path", str(pair_dir), *asked, "--adapter", f"low={two}", "--video_save_path", str(made)]
    assert main(command) == 0, capsys.readouterr().err
    assert f"high={one}: " in capsys.readouterr().err
    assert main(["--repeat", str(made), "--video_save_path", str(again), "--recorded_files"]) == 0, (
        capsys.readouterr().err
    )
    first, second = load_file(made), load_file(again)
    assert first and all(torch.equal(first[name], second[name]) for name in first)
    assert main(["--checkpoint_path", str(bundle_dir), *asked, "--video_save_path", str(made)]) == 2
    assert "has one network, for all noise levels: leave high= out" in capsys.readouterr().err


def test_an_adapter_of_one_of_two_networks_says_which(pair_dir, one, tmp_path):
    pair = Bundle.open(pair_dir)
    with pytest.raises(UserError, match="has two experts"):
        bundle_fingerprint(pair)
    low = replace(read_adapter(one), base=bundle_fingerprint(pair, "transformer_2"))
    write_adapter(tmp_path / "low", low)
    other = replace(low, base="0" * 16)
    write_adapter(tmp_path / "other", other)
    assert adapter_cache.read_adapter_of(f"low={tmp_path / 'low'}", pair).base == low.base
    with pytest.raises(UserError, match="was trained with other weights"):
        adapter_cache.read_adapter_of(f"high={tmp_path / 'other'}", pair)


def test_merged_is_the_same_function(bundle_dir, one, two, tmp_path):
    """One call of the network, without what sampling makes of rounding."""
    merge_bundle(Bundle.open(bundle_dir), {one: 0.8, two: 0.5}, tmp_path / "merged")
    merged, plain = (TextToVideo.from_pretrained(path, device="cpu") for path in (tmp_path / "merged", bundle_dir))
    asked = {"num_steps": 1, "guidance": 1.0}
    assert distance(latents(merged, **asked), latents(plain, adapters={one: 0.8, two: 0.5}, **asked)) <= 1e-6


def test_many_come_and_go(bundle_dir, tmp_path):
    pipeline = TextToVideo.from_pretrained(bundle_dir, device="cpu")
    dit = pipeline.denoiser._denoiser.dit
    alive, counts = weakref.WeakSet(), set()
    for number in range(2 * adapter_cache.MAX_ADAPTERS):
        path = make_adapter(tmp_path / "one", bundle_dir, number, patterns=("blocks.0.mlp.*",))
        (tmp_path / "one").rename(tmp_path / f"{number}")
        path = str(tmp_path / f"{number}")
        with pipeline._adapters.held([path]) as names:
            assert names[path] in adapter_names(dit)
            alive.update(module for name, module in dit.named_modules() if name.endswith(f".adapters.{names[path]}"))
        if number >= adapter_cache.MAX_ADAPTERS:
            counts.add(sum(parameter.numel() for parameter in dit.parameters()))
    assert len(counts) == 1 and len(adapter_names(dit)) == adapter_cache.MAX_ADAPTERS
    gc.collect()
    assert len(alive) == 2 * adapter_cache.MAX_ADAPTERS, "two linears have each"


def test_one_that_is_used_is_not_dropped(bundle_dir, one, two, monkeypatch):
    monkeypatch.setattr(adapter_cache, "MAX_ADAPTERS", 0)
    pipeline = TextToVideo.from_pretrained(bundle_dir, device="cpu")
    dit = pipeline.denoiser._denoiser.dit
    first = pipeline.stream(PROMPTS, adapters={one: 1.0}, seeds=SEEDS, batch_size=1)
    video = next(first)
    assert latents(pipeline, adapters={two: 1.0}) is not None and len(adapter_names(dit)) == 1
    rest = [video, *first]
    assert adapter_names(dit) == []
    expected = latents(pipeline, adapters={one: 1.0}, batch_size=1)
    assert torch.equal(torch.stack([each.latents_CTHW for each in rest]), expected)


def test_one_is_dropped_after_another_could_not_be(bundle_dir, one, two, monkeypatch):
    pipeline = TextToVideo.from_pretrained(bundle_dir, device="cpu")
    with pipeline._adapters.held([one]) as names:
        stuck = names[one]

    def remove(denoiser, name):
        if name == stuck:
            raise RuntimeError("it stays")
        remove_adapter(denoiser, name)

    remove_adapter = AdaptableDenoiser.remove_adapter
    monkeypatch.setattr(AdaptableDenoiser, "remove_adapter", remove)
    monkeypatch.setattr(adapter_cache, "MAX_ADAPTERS", 0)
    with pytest.raises(RuntimeError, match="it stays"), pipeline._adapters.held([two]):
        pass
    with pipeline._adapters.held([]):
        assert list(adapter_names(pipeline.denoiser._denoiser.dit)) == [stuck]


def test_a_changed_file_is_read_again(bundle_dir, tmp_path):
    pipeline = TextToVideo.from_pretrained(bundle_dir, device="cpu")
    path = make_adapter(tmp_path / "it", bundle_dir, 1)
    before = latents(pipeline, adapters={path: 1.0})
    make_adapter(tmp_path / "it", bundle_dir, 2)
    assert distance(latents(pipeline, adapters={path: 1.0}), before) > 0.01


# ----------------------------------------------------------------------------------------------------- the command line


def run(bundle_dir, out, *options):
    return main(["--checkpoint_path", str(bundle_dir), "--video_save_path", str(out), "--device", "cpu", *options])


def saved(path):
    from safetensors.torch import load_file

    return load_file(path)["latents_CTHW"]


def test_generate(pipeline, bundle_dir, one, two, tmp_path, capsys):
    out = tmp_path / "a.safetensors"
    options = ["--prompt", PROMPTS[0], "--seed", "3", "--adapter_interval", "0.1", "30"]
    assert run(bundle_dir, out, *options, "--adapter", f"{one}:0.8", "--adapter", two) == 0, capsys.readouterr().err
    expected = latents(pipeline, PROMPTS[:1], [3], adapters={one: 0.8, two: 1.0}, adapter_interval=(0.1, 30.0))[0]
    assert torch.equal(saved(out), expected)
    record = json.loads(record_path(out).read_text())
    assert [(kind["path"], kind["scale"]) for kind in record["adapters"]] == [(one, 0.8), (two, 1.0)]
    assert (
        main(
            [
                "--repeat",
                str(out),
                "--video_save_path",
                str(tmp_path / "b.safetensors"),
                "--device",
                "cpu",
                "--recorded_files",
            ]
        )
        == 0
    )
    assert torch.equal(saved(tmp_path / "b.safetensors"), expected)


def test_an_adapter_is_read_once_for_all_its_records(one, tmp_path, monkeypatch):
    copied, read = tmp_path / "copy", []
    shutil.copytree(one, copied)
    monkeypatch.setattr(adapter_cache, "sha256_of", lambda file, _: read.append(file) or sha256_of(file))
    before, again = (adapter_cache.scaled_adapters({str(copied): scale})[0] for scale in (1.0, 0.5))
    assert len(read) == 1 and before.sha256 == again.sha256
    with read[0].open("ab") as file:
        file.write(b" ")
    assert adapter_cache.scaled_adapters({str(copied): 1.0})[0].sha256 != before.sha256


def test_what_was_saved_from_python_is_made_again_with_its_adapters(pipeline, one, tmp_path):
    (video,) = pipeline(PROMPTS[:1], seeds=[3], adapters={one: 0.8})
    path = str(video.save(tmp_path / "a.mp4"))
    assert (
        main(
            [
                "--repeat",
                path,
                "--video_save_path",
                str(tmp_path / "b.safetensors"),
                "--device",
                "cpu",
                "--recorded_files",
            ]
        )
        == 0
    )
    assert torch.equal(saved(tmp_path / "b.safetensors"), video.latents_CTHW)


def test_each_line_of_a_prompt_file_has_its_own(pipeline, bundle_dir, one, two, tmp_path, capsys):
    lines = [
        {"prompt": PROMPTS[0], "seed": 3, "adapter": [f"{one}:0.8"]},
        {"prompt": PROMPTS[1], "seed": 4, "adapter": [f"{one}:0.5", two]},
        {"prompt": PROMPTS[2], "seed": 5, "adapter": []},
        {"prompt": PROMPTS[2], "seed": 6},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    file, out = str(tmp_path / "prompts.jsonl"), tmp_path / "v.safetensors"
    assert run(bundle_dir, out, "--prompt_file", file, "--adapter", two) == 0, capsys.readouterr().err
    adapters = [{one: 0.8}, {one: 0.5, two: 1.0}, {}, {two: 1.0}]
    expected = latents(pipeline, [*PROMPTS, PROMPTS[2]], [3, 4, 5, 6], adapters=adapters)
    for number in range(4):
        assert torch.equal(saved(tmp_path / f"v_{number:04d}.safetensors"), expected[number])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--adapter", "{one}", "--runtime", "onnx"], "has no onnx/: make a bundle that has it"),
        (["--adapter", "{one}", "--compile"], "merge it into its base first"),
        (["--adapter", "{one}", "--resident_blocks", "1"], "merge it into its base first"),
        (["--adapter", "{one}:nan"], "the scale must be a finite number"),
        (["--adapter", "{one}", "--adapter", "{one}:2"], "given twice"),
        (["--adapter", "nowhere:0.5"], "nowhere does not exist"),
        (["--adapter", "{bundle}"], "holds no adapter"),
        (["--adapter_interval", "0.5", "3"], "adapter_interval needs an adapter"),
        (["--adapter", "{wrong}"], "was trained with other weights"),
        (["--adapter", "{misfit}"], r"blocks.1.mlp.fc1.lora_A.weight \[2, 31\], not \[2, 32\]"),
    ],
)
def test_mistakes_are_told_in_one_line(options, message, bundle_dir, one, tmp_path, capsys):
    import re

    make_adapter(tmp_path / "wrong", bundle_dir, 1)
    manifest = json.loads((tmp_path / "wrong" / "megadit.json").read_text())
    manifest["base"]["fingerprint"] = "0" * 16
    (tmp_path / "wrong" / "megadit.json").write_text(json.dumps(manifest))
    misfit(tmp_path / "misfit.safetensors", bundle_dir)
    places = {"one": one, "bundle": bundle_dir, "wrong": tmp_path / "wrong", "misfit": tmp_path / "misfit.safetensors"}
    options = [option.format(**places) for option in options]
    assert run(bundle_dir, tmp_path / "out.mp4", "--prompt", "a seven", *options) == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1 and re.search(message, stderr), stderr
    assert not (tmp_path / "out.mp4").exists()


def misfit(path, bundle_dir):
    from safetensors.torch import load_file, save_file

    make_adapter(path, bundle_dir, 1, patterns=("blocks.1.mlp.*",), base=False)
    tensors = load_file(path)
    tensors["transformer.blocks.1.mlp.fc1.lora_A.weight"] = torch.ones(2, 31)
    save_file(tensors, path)


def test_a_step_cache_was_not_measured_with_adapters(pipeline, one):
    from megadit.infer.pipeline.step_cache import CachePlan, plan_key
    from megadit.infer.sampling.resolve import resolve_settings

    settings = resolve_settings(pipeline.defaults, cache_budget=0.1)
    plan = CachePlan(
        budget=0.1, skipped=(1,), num_calls=3, largest_error=0.0, num_videos=1, settings=plan_key(settings)
    )
    cached = TextToVideo(
        denoiser=pipeline.denoiser,
        tokenizer=pipeline.tokenizer,
        text_encoder=pipeline.text_encoder,
        config=pipeline.config,
        defaults=pipeline.defaults,
        adapters=pipeline._adapters,
        cache_plans=lambda: [plan],
    )
    with pytest.raises(UserError, match="was calibrated without adapters"):
        cached(PROMPTS, adapters={one: 1.0}, cache_budget=0.1)


# ------------------------------------------------------------------------------------------------------ other commands


def test_convert_there_and_back(bundle_dir, one, tmp_path, capsys):
    single, again = tmp_path / "single.safetensors", tmp_path / "again"
    assert convert([one, str(single)]) == 0 and convert([str(single), str(again)]) == 0, capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in again.iterdir()} == {
        file.name: file.read_bytes() for file in Bundle.open(bundle_dir).path.parent.joinpath(one).iterdir()
    }
    assert convert([one, str(tmp_path / "half.safetensors"), "--dtype", "bfloat16", "--base", str(bundle_dir)]) == 0
    assert read_adapter(tmp_path / "half.safetensors").base == read_adapter(one).base
    assert convert([one, str(tmp_path / "x"), "--to", "diffusers"]) == 2
    assert "leave out all other options but --base and --dtype" in capsys.readouterr().err
    assert convert([str(bundle_dir), str(tmp_path / "x"), "--base", str(bundle_dir)]) == 2


def test_info(bundle_dir, one, tmp_path):
    facts = describe(tmp_path / one)
    assert facts["kind"] == "lora" and facts["rank"] == "2" and facts["alpha / rank"] == "2"
    assert facts["linears"] == len(read_adapter(one).changes) and facts["training step"] == 1
    assert facts["weights of its base"] == bundle_fingerprint(Bundle.open(bundle_dir))
    misfit(tmp_path / "foreign.safetensors", bundle_dir)
    facts = describe(tmp_path / "foreign.safetensors")
    assert facts["linears"] == 2 and facts["rank"] == "2" and facts["family"].startswith("not said")


def test_push_and_pull(one, tmp_path):
    push_bundle(one, f"file://{tmp_path}/store/one")
    pull_bundle(f"file://{tmp_path}/store/one", tmp_path / "here")
    pull_bundle(f"file://{tmp_path}/store/one", tmp_path / "here")
    assert read_adapter(tmp_path / "here").to_state()[1] == read_adapter(one).to_state()[1]
    file = tmp_path / "store" / "one" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")
    with pytest.raises(UserError, match="differs from its checksum"):
        pull_bundle(f"file://{tmp_path}/store/one", tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("settings", [{"compile": True}, {"resident_blocks": 1}])
def test_blocks_that_are_compiled_or_take_turns_have_none(bundle_dir, one, settings):
    pipeline = TextToVideo.from_pretrained(bundle_dir, device="cpu", **settings)
    with pytest.raises(UserError, match="all blocks, neither compiled nor recorded"):
        pipeline.admit_adapters({str(one): 1.0})
