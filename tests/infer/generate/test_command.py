import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megadit.infer.conditioning.items import ConditioningItem
from megadit.infer.generate import command as generate
from megadit.infer.generate.command import main
from megadit.infer.generate.outputs import output_paths
from megadit.infer.generate.specs import VideoSpec, prompt_lines
from megadit.infer.media.contact_sheet import contact_sheet, grid_columns
from megadit.infer.media.video_io import read_video, write_video
from megadit.models.diffusion.settings import SamplingSettings
from megadit.models.shared.errors import UserError
from megadit.models.shared.words import write_words
from tests.bundles import DEFAULTS


@pytest.fixture
def run(bundle_dir, tmp_path, monkeypatch, capsys):
    """Runs the command on the tiny bundle in an empty directory; gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, checkpoint: str = str(bundle_dir)):
        code = main(["--checkpoint_path", checkpoint, "--device", "cpu", *arguments])
        return code, *capsys.readouterr()

    return run


def test_one_video_with_its_settings(run, tmp_path, pipeline):
    code, stdout, stderr = run(
        "--prompt", "a red seven", "--video_save_path", "seven.mp4", "--seed", "5", "--fps", "12",
        "--num_video_frames", "7", "--height", "32", "--width", "36", "--num_steps", "2", "--sampler", "HEUN",
        "--guidance", "2", "--guidance_convention", "nemo", "--negative_prompt", "blue",
    )  # fmt: skip
    assert code == 0 and stdout == "seven.mp4\n"
    assert "sampling: 3/3" in stderr  # Heun: 2 steps, 3 calls
    frames, fps = read_video("seven.mp4")
    assert frames.shape == (7, 32, 36, 3) and fps == 12
    settings = json.loads((tmp_path / "seven.mp4.json").read_text())
    expected = {
        "prompt": "a red seven", "seed": 5, "fps": 12, "num_frames": 7, "height": 32, "width": 36, "num_steps": 2,
        "sampler": "heun", "guidance": 3, "negative_prompt": "blue", "sigma_max": 20,
    }  # fmt: skip
    assert settings.items() >= expected.items()
    names = ("num_frames", "height", "width", "num_steps", "sampler", "guidance", "negative_prompt", "fps")
    (same,) = pipeline(["a red seven"], seeds=5, **{name: settings[name] for name in names})
    # Random weights give noise, of which H.264 keeps the brightness best (measured 0.86; another seed gives 0.2).
    assert np.corrcoef(same.video.mean(-1).ravel(), frames.mean(-1).ravel())[0, 1] > 0.8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seven.mp4", "seven.mp4.json"]


def test_prompts_times_seeds_are_numbered(run, tmp_path):
    (tmp_path / "prompts.txt").write_text("a blue two\n\n  ../../up and away  \n")
    code, stdout, _ = run(
        "--prompt", "one", "two", "--prompt", "one", "--prompt_file", "prompts.txt", "--seeds", "1", "2"
    )
    assert code == 0
    names = [f"{i:04d}_{slug}_seed{1 + i % 2}" for i, slug in enumerate(
        ["one", "one", "two", "two", "one", "one", "a-blue-two", "a-blue-two", "up-and-away", "up-and-away"]
    )]  # fmt: skip
    assert stdout.split() == [f"outputs/{name}.mp4" for name in names]
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"prompts.txt"} | {f"outputs/{name}.{suffix}" for name in names for suffix in ("mp4", "mp4.json")}


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_one_frame_makes_an_image(run, suffix):
    assert run("--prompt", "a red seven", "--num_video_frames", "1", "--video_save_path", f"seven.{suffix}")[0] == 0
    frames, fps = read_video(f"seven.{suffix}")
    assert frames.shape == (1, 16, 24, 3) and fps == 0


def test_one_frame_into_a_directory_is_a_png_equal_to_the_pipelines(run, pipeline):
    assert run("--prompt", "a red seven", "--num-video-frames", "1", "--video-save-path", "images")[0] == 0
    frames, _ = read_video("images/0000_a-red-seven_seed0.png")
    (same,) = pipeline(["a red seven"], num_frames=1)
    assert np.array_equal(frames, same.video)


def test_subject_name_fills_its_place(run, tmp_path):
    base = ["--num_video_frames", "1", "--video_save_path"]
    assert run("--prompt", "a red {subject}", "--subject_name", "seven", *base, "subject.png")[0] == 0
    assert run("--prompt", "a red seven", *base, "plain.png")[0] == 0
    assert (tmp_path / "subject.png").read_bytes() == (tmp_path / "plain.png").read_bytes()
    assert json.loads((tmp_path / "subject.png.json").read_text())["prompt"] == "a red seven"


def test_copies_of_tokenizer_and_text_encoder(run, bundle_dir):
    copies = ["--tokenizer_cache_dir", str(bundle_dir), "--tokenizer_model", "tokenizer"]
    assert run("--prompt", "a", *copies, "--t5_cache_dir", str(bundle_dir / "text_encoder"))[0] == 0


def test_batch_size_and_dtype_reach_the_pipeline(run):
    *_, stderr = run("--prompt", "a", "b", "c", "--batch_size", "2", "--video_save_path", "out")
    assert "sampling: 6/6" in stderr  # two batches of three steps
    *_, stderr = run("--prompt", "a", "b", "c", "--dtype", "bf16", "--video_save_path", "out")
    assert "sampling: 3/3" in stderr
    with open("out/0000_a_seed0.mp4.json") as file:
        assert json.load(file)["dtype"] == "bf16"


MISTAKES = [
    ([], "no prompt"),
    (["--prompt_file", "nowhere.txt"], "nowhere.txt: the prompts cannot be read: nowhere.txt does not exist"),
    (["--prompt", "a", "--num_steps", "0"], "num_steps=0 must be greater than 0"),
    (["--prompt", "a", "--num_video_frames", "-3"], "--num_video_frames=-3 must be greater than 0"),
    (["--prompt", "a", "--num_stepz", "3"], "unknown argument '--num_stepz'; did you mean '--num_steps'?"),
    (["--prompt", "a", "--num_step", "3"], "did you mean '--num_steps'?"),
    (["--prompt", "a", "--num_steps", "many"], "--steps: invalid int value: 'many'"),
    (["--prompt", "a", "--num_steps"], "--steps: expected one argument"),
    (["--prompt", "a", "--guidance_convention", "cosmos"], "guidance_convention='cosmos' is unknown; choose one of"),
    (["--seeds", "1", "--prompt"], "argument --prompt: expected at least one argument"),
    (["--prompt", "a", "--fps", "0"], "fps=0"),
    (["--prompt", "a", "--batch_size", "0"], "--batch_size=0"),
    (["--prompt", "a", "--height", "18"], "height=18 is not a multiple of 4; use 16 or 20"),
    (["--prompt", "a", "--sampler", "DDIM"], "sampler 'DDIM' is not available: euler takes the same steps"),
    (["--prompt", "a", "--sampler", "dim"], "sampler 'dim' is not available; choose one of euler, heun, dpm2"),
    (["--prompt", "a", "--seed", "1", "--seeds", "2"], "not both"),
    (["--prompt", "a", "--guidance_convention", "nemo"], "give --guidance too"),
    (
        ["--prompt", "a", "--video_save_path", "o/a.png", "--num_frames", "1", "--contact_sheet", "./o/a.png"],
        "is the file",
    ),
    (["--prompt", "a", "--num_devices", "2"], "--num_devices=2, but 1 were started"),
    (["--prompt", "a", "--tp_size", "2"], "1 processes cannot be divided into replicas of 2 (tp_size=2, cp_size=1)"),
    (["--prompt", "a", "--tp_size", "0"], "tp_size=0"),
    (["--prompt", "a", "--cfg_parallel"], "cannot be divided into replicas of 2 (tp_size=1, cp_size=1, cfg_parallel)"),
    (["--prompt", "a", "--cp_size", "2"], "replicas of 2 (tp_size=1, cp_size=2)"),
    (["--prompt", "a", "--guardrail_dir", "guards"], "guardrail_dir=guards: there is no guardrail.py"),
    (["--prompt", "a", "--tokenizer_cache_dir", "cache"], "needs --tokenizer_model"),
    (["--prompt", "a", "--tokenizer_model", "nowhere"], "nowhere/config.json does not exist"),
    (["--prompt", "a", "--t5_cache_dir", "nowhere"], "nowhere/config.json does not exist"),
    (["--prompt", "a {subject}"], "--subject_name"),
    (["--prompt", "a", "--subject_name", "robot"], "{subject}"),
    (["--prompt", "a", "--dtype", "int8"], "dtype 'int8' is unknown"),
    (["--prompt", "a", "--device", "abacus"], "device 'abacus' cannot be used"),
    (["--prompt", "a", "--device", "meta"], "device 'meta' cannot be used"),
    (["--prompt", "a", "--device", "cuda:99"], "device 'cuda:99' is not there"),
    (["--prompt", "a", "--video_save_path", "a.avi"], "cannot write .avi"),
    (["--prompt", "a", "--video_save_path", "/proc/a.mp4"], "--video_save_path=/proc/a.mp4: /proc"),
    (["--prompt", "a", "--video_save_path", "a.gif", "--format", "mp4"], "says .gif, --format says mp4"),
    (["--prompt", "a", "--contact_sheet", "a.txt"], "--contact_sheet=a.txt"),
    (["--prompt", "a", "--guidance", "1", "--guidances", "2"], "not both"),
    (["--prompt", "a", "--shift", "wide"], "argument --shift: invalid float or auto or auto_video value: 'wide'"),
    (["--prompt", "a", "--schedule", "cosine"], "schedule 'cosine' is not available"),
    (["--prompt", "a", "--eta", "1", "--sampler", "unipc"], "cannot add noise"),
    (["--prompt", "a", "--autoguidance", "nowhere"], "nowhere"),
    (["--prompt", "a", "--strength", "0.5"], "--strength=0.5 needs --input_video"),
    (["--prompt", "a", "--keep_frames", "5"], "--keep_frames=5 needs --continue_video"),
    (["--prompt", "a", "--input_video", "nowhere.mp4"], "cannot read nowhere.mp4"),
    (["--prompt", "a", "--input_video", "a", "--continue_video", "b"], "not both"),
    (["--repeat", "nowhere.mp4"], "nowhere.mp4"),
    (["--prompt", "a\udcff"], "is not valid text"),
    (["--prompt", "a", "--video_save_path", "a.png"], "a.png is an image; use .mp4 for 5 frames"),
    (["--prompt", "a", "--video_save_path", "/dev/null/x"], "cannot make the directory"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_one_line_and_come_before_the_network(run, monkeypatch, arguments, message):
    def load_dit(*_, **__):
        raise AssertionError("the network was loaded")

    monkeypatch.setattr(generate.Bundle, "load_dit", load_dit)
    code, stdout, stderr = run(*arguments)
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ") and stderr.count("\n") == 1 and message in stderr


def test_missing_and_wrong_checkpoints(run, tmp_path):
    code, _, stderr = run("--prompt", "a", checkpoint="nowhere")
    assert code == 2 and stderr.count("\n") == 1 and "nowhere" in stderr
    code, _, stderr = run("--prompt", "a", checkpoint=str(tmp_path))
    assert code == 2 and stderr.count("\n") == 1 and "neither a bundle" in stderr
    code, _, stderr = run("--prompt", "a", checkpoint="")
    assert code == 2 and stderr.count("\n") == 1 and "--checkpoint_path" in stderr


def test_debug_shows_the_traceback(run):
    with pytest.raises(UserError, match="no prompt"):
        run("--debug")


def specs(*prompts: str, num_frames: int = 5, fps: float = 8) -> list[VideoSpec]:
    settings = SamplingSettings(num_steps=3, guidance=2.0, num_frames=num_frames, height=16, width=24, fps=fps)
    return [VideoSpec(prompt=prompt, seed=0, settings=settings) for prompt in prompts]


def test_names_never_leave_the_directory(tmp_path):
    prompts = ["../../etc/passwd", "/etc/passwd", "..", "", "a\0b\n", "日本", "x" * 300]
    paths = output_paths(str(tmp_path / "out"), specs(*prompts))
    assert len(set(paths)) == len(prompts)
    for path in paths:
        assert path.parent == tmp_path / "out" and len(path.name) < 80
        path.touch()


def test_several_videos_beside_a_file_name(tmp_path):
    paths = output_paths(str(tmp_path / "new/clip.mp4"), specs("a", "b"))
    assert paths == [tmp_path / "new/clip_0000.mp4", tmp_path / "new/clip_0001.mp4"]


def test_an_existing_directory_may_have_any_name(tmp_path):
    (tmp_path / "videos.mp4").mkdir()
    (path,) = output_paths(str(tmp_path / "videos.mp4"), specs("a"))
    assert path.parent == tmp_path / "videos.mp4"


def test_formats_name_files_and_folders(tmp_path):
    def name(format, num_frames):
        return output_paths(str(tmp_path), specs("a", num_frames=num_frames), format)[0].name

    assert [name(None, 5), name(None, 1)] == ["0000_a_seed0.mp4", "0000_a_seed0.png"]
    assert [name("png", 5), name("png", 1)] == ["0000_a_seed0", "0000_a_seed0.png"]
    assert [name("gif", 5), name("safetensors", 5)] == ["0000_a_seed0.gif", "0000_a_seed0.safetensors"]


def test_capitals_in_a_suffix_change_nothing(run, tmp_path):
    assert run("--prompt", "a", "--num_steps", "1", "--video_save_path", "A.SAFETENSORS")[0] == 0
    assert load_file("A.SAFETENSORS")["latents_CTHW"].ndim == 4
    assert (
        run("--repeat", "A.SAFETENSORS", "--video_save_path", "B.Safetensors", "--recorded_files", checkpoint="")[0]
        == 0
    )
    assert (tmp_path / "A.SAFETENSORS").read_bytes() == (tmp_path / "B.Safetensors").read_bytes()
    with pytest.raises(UserError, match="fps=200.0 must lie between"):  # before the work, not after it
        output_paths(str(tmp_path / "a.GIF"), specs("a", fps=200.0))


# ------------------------------------------------------------------------------------------------- inputs and outputs


def images(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.png"))}


def test_a_jsonl_file_overrides_settings_line_by_line(run, tmp_path, pipeline):
    lines = [
        {"prompt": "a red {subject}", "seed": 3, "num_frames": 1},
        {"prompt": "a blue two", "seeds": [4, 5], "num_video_frames": 1, "cfg_text": 5.0, "sampler": "heun"},
        {"prompt": "a clip", "negative_prompt": "green", "height": 32, "shift": "auto"},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    code, stdout, stderr = run("--prompt_file", "prompts.jsonl", "--subject_name", "seven", "--num_steps", "2")
    assert code == 0, stderr
    names = ["0000_a-red-seven_seed3.png", "0001_a-blue-two_seed4.png", "0002_a-blue-two_seed5.png"]
    assert stdout.split() == [f"outputs/{name}" for name in [*names, "0003_a-clip_seed0.mp4"]]
    (same,) = pipeline(["a red seven"], seeds=3, num_frames=1, num_steps=2)
    assert np.array_equal(read_video(f"outputs/{names[0]}")[0], same.video)
    (same,) = pipeline(["a blue two"], seeds=5, num_frames=1, num_steps=2, guidance=5.0, sampler="heun")
    # it shared a batch: float32 sums in another order
    assert np.abs(read_video(f"outputs/{names[2]}")[0].astype(int) - same.video).max() <= 1
    clip = json.loads((tmp_path / "outputs/0003_a-clip_seed0.mp4.json").read_text())
    assert (clip["height"], clip["negative_prompt"], clip["shift"]) == (32, "green", 2**0.5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1]", 'must be an object with a "prompt"'),
        ('{"seed": 1}', 'must be an object with a "prompt"'),
        ('{"prompt": "a", "gidance": 1}', "'gidance' is unknown; did you mean 'guidance'"),
        ('{"prompt": "a", "num_steps": "3"}', "num_steps='3' must be a whole number"),
        ('{"prompt": "a", "num_steps": true}', "num_steps=True must be a whole number"),
        ('{"prompt": "a", "sigmas": ["3"]}', "sigmas='3' must be a list of numbers"),
        ('{"prompt": "a", "seeds": [1.5]}', "seeds=1.5 must be a list of whole numbers"),
        ('{"prompt": "a", "seeds": []}', "seeds=[] holds no seed"),
        ('{"prompt": "a", "seed": 1, "seeds": [1]}', "not both"),
        ('{"prompt": "a", "shift": "wide"}', "shift='wide' must be a number or auto"),
        ('{"prompt": "a", "num_steps": 0}', "num_steps=0"),
        ('{"prompt": "a", "steps": 0}', "num_steps=0"),
        ('{"prompt": "a", "cfg_image": 2, "image_guidance": 1}', "cfg_image and image_guidance are names of one"),
    ],
)
def test_mistakes_in_a_jsonl_file_name_their_line(run, tmp_path, line, message):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "fine"}\n' + line)
    code, _, stderr = run("--prompt_file", "prompts.jsonl")
    assert code == 2 and stderr.count("\n") == 1 and message in stderr
    assert not (tmp_path / "outputs").exists()


def test_a_grid_of_scales_and_seeds_with_its_contact_sheet(run, tmp_path):
    arguments = ["--prompt", "a red seven", "a blue two", "--guidances", "1", "4", "--seeds", "1", "2", "3"]
    code, stdout, _ = run(*arguments, "--contact_sheet", "sheet.png", "--video_save_path", "grid")
    assert code == 0 and len(stdout.split()) == 13 and stdout.split()[-1] == "sheet.png"
    records = [json.loads(path.read_text()) for path in sorted((tmp_path / "grid").glob("*.json"))]
    expected = [(p, g, s) for p in ("a red seven", "a blue two") for g in (1, 4) for s in (1, 2, 3)]
    assert [(record["prompt"], record["guidance"], record["seed"]) for record in records] == expected
    (sheet,), _ = read_video("sheet.png")
    assert sheet.shape[1] > sheet.shape[0] * 0.5  # 3 columns of 24 pixels, 4 rows of 16 and their captions
    assert (sheet == 255).all(-1).mean() < 0.6  # not mostly paper
    run("--prompt", "a", "--seeds", "1", "2", "--contact_sheet", "sheet.mp4", "--video_save_path", "two")
    assert len(read_video("sheet.mp4")[0]) == 5


def test_labels_of_a_contact_sheet_are_whole():
    videos = [np.zeros((2, 16, 24, 3), np.uint8)] * 3
    said = [f"{'a long way to the end of a caption ' * 3}{word}" for word in ("one", "two", "six")]
    whole, other = (contact_sheet(videos, [caption] * 3, 3) for caption in said[:2])
    assert whole.shape == other.shape and not np.array_equal(whole, other)
    short, alike = (contact_sheet(videos, [caption] * 3, 3, num_lines=2) for caption in said[:2])
    assert np.array_equal(short, alike) and short.shape[1] < whole.shape[1]
    endless = contact_sheet(videos, ["word " * 10_000] * 3, 3)
    assert endless.shape[1] < 400
    tall = contact_sheet([np.zeros((1, 256, 8, 3), np.uint8)], ["a caption wider than the video"], 1)
    assert tall.shape[2] < 32  # pixels: room for four letters
    assert [grid_columns(count) for count in (1, 2, 4, 5, 12)] == [1, 2, 2, 3, 4]


def test_prompts_of_one_seed_make_a_square(run):
    prompts = [f"a {number}" for number in range(5)]
    arguments = ["--num_steps", "1", "--contact_sheet", "sheet.png", "--video_save_path", "many"]
    assert run("--prompt", *prompts, *arguments)[0] == 0
    height, width = read_video("sheet.png")[0].shape[1:3]
    assert 1.2 < width / height < 2, "three columns and two rows"


@pytest.mark.parametrize("suffix", ["mp4", "gif", "webp"])
def test_repeat_makes_the_same_file_again(run, tmp_path, suffix):
    arguments = ["--prompt", 'a "red" 日本 seven', "--seed", "5", "--sampler", "heun", "--churn", "2"]
    arguments += ["--guidance_interval", "0.1", "9", "--sigmas", "15", "4", "0.5", "--dtype", "bf16"]
    assert run(*arguments, "--video_save_path", f"first.{suffix}")[0] == 0
    assert (
        run("--repeat", f"first.{suffix}", "--video_save_path", f"again.{suffix}", "--recorded_files", checkpoint="")[0]
        == 0
    )
    assert (tmp_path / f"first.{suffix}").read_bytes() == (tmp_path / f"again.{suffix}").read_bytes()
    assert (tmp_path / f"first.{suffix}.json").read_bytes() == (tmp_path / f"again.{suffix}.json").read_bytes()
    beside = ["--repeat", f"again.{suffix}.json", "--recorded_files", "--seed", "6", "--video_save_path", "other.mp4"]
    assert run(*beside, checkpoint="")[0] == 0
    record, other = (json.loads((tmp_path / f"{name}.json").read_text()) for name in (f"first.{suffix}", "other.mp4"))
    assert other == record | {"seed": 6}


def test_files_with_holes_are_not_read_to_their_end(run, tmp_path):
    """Of 4 TiB, which a few bytes of an archive can hold."""
    for name in ("a.png", "a.safetensors", "a.txt"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 1 << 42)
    for words in (
        ["--image", "a.png"],
        ["--input_video", "a.png"],
        ["--adapter", "a.safetensors"],
        ["--prompt_file", "a.txt"],
    ):
        code, _, error = run("--prompt", "a", *words)
        assert code == 2 and error.count("\n") == 1 and "is longer than" in error, words


def test_every_kind_of_file_keeps_a_record_of_its_own(run, tmp_path):
    for seed, name in enumerate(("cat.mp4", "cat.gif", "cat.webp")):
        assert run("--prompt", "a", "--seed", str(seed), "--num_steps", "1", "--video_save_path", name)[0] == 0
    assert run("--prompt", "a", "--seed", "3", "--num_frames", "1", "--video_save_path", "cat.png")[0] == 0
    seeds = [json.loads((tmp_path / f"cat.{kind}.json").read_text())["seed"] for kind in ("mp4", "gif", "webp", "png")]
    assert seeds == [0, 1, 2, 3]


def test_repeat_of_frames_latents_and_given_videos(run, tmp_path, pipeline):
    assert run("--prompt", "a", "--video_save_path", "clip.mp4", "--num_video_frames", "9")[0] == 0
    arguments = ["--prompt", "b", "--continue_video", "clip.mp4", "--keep_frames", "1"]
    assert run(*arguments, "--format", "png", "--video_save_path", "frames")[0] == 0
    (folder,) = (path for path in (tmp_path / "frames").iterdir() if path.is_dir())
    assert len(images(folder)) == 5
    frames = ["--repeat", str(folder), "--recorded_files", "--format", "png", "--video_save_path", "again"]
    assert run(*frames, checkpoint="")[0] == 0
    assert images(tmp_path / "again" / folder.name) == images(folder)
    assert run("--repeat", str(folder), "--video_save_path", "b.safetensors", "--recorded_files", checkpoint="")[0] == 0
    latents = load_file("b.safetensors")["latents_CTHW"]
    decoded = pipeline._decode(latents, 5)
    assert np.array_equal(decoded[2], read_video(sorted(folder.glob("*.png"))[2])[0][0])
    assert (
        run("--repeat", "b.safetensors", "--video_save_path", "c.safetensors", "--recorded_files", checkpoint="")[0]
        == 0
    )
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()
    (tmp_path / "clip.mp4").write_bytes((tmp_path / "clip.mp4").read_bytes() + b" ")
    code, _, stderr = run(*frames, checkpoint="")
    assert code == 2 and stderr.count("\n") == 1 and "clip.mp4, one of its conditioning files, has changed" in stderr


def test_repeat_notices_another_checkpoint(run, tmp_path, bundle_dir):
    shutil.copytree(bundle_dir, tmp_path / "bundle")
    one_frame = ["--prompt", "a", "--num_video_frames", "1", "--video_save_path", "a.png"]
    assert run(*one_frame, checkpoint="bundle")[0] == 0
    manifest = json.loads((tmp_path / "bundle/megadit.json").read_text())
    manifest["files"]["transformer/model.safetensors"]["sha256"] = "0" * 64
    (tmp_path / "bundle/megadit.json").write_text(json.dumps(manifest))
    code, _, stderr = run("--repeat", "a.png", "--recorded_files", checkpoint="")
    assert code == 2 and "is no longer the checkpoint that made a.png" in stderr
    assert run("--repeat", "a.png", checkpoint="bundle")[0] == 0


def test_video_to_video(run, tmp_path, pipeline):
    write_video(
        tmp_path / "grey.gif", np.arange(5, dtype=np.uint8)[:, None, None, None] * np.full((16, 24, 3), 50, np.uint8), 8
    )
    arguments = ["--prompt", "a", "--input_video", "grey.gif", "--strength", "0.4", "--num_steps", "5"]
    assert run(*arguments, "--video_save_path", "a.safetensors")[0] == 0
    given = ConditioningItem(frames=read_video("grey.gif")[0], strength=0.4)
    (same,) = pipeline(["a"], num_steps=5, conditioning=given)
    assert torch.equal(load_file("a.safetensors")["latents_CTHW"], same.latents_CTHW)
    assert json.loads((tmp_path / "a.safetensors.json").read_text())["num_denoiser_calls"] == 2


def test_words_that_training_never_said_are_warned_of(run, tmp_path, bundle_dir):
    assert "no caption" not in run("--prompt", "a zeppelin", "--num_steps", "1")[2]  # a bundle that keeps none
    shutil.copytree(bundle_dir, tmp_path / "told")
    write_words(tmp_path / "told", ["a", "red", "seven"])
    code, _, stderr = run("--prompt", "A red seven", "a red zeppelin", "--num_steps", "1", checkpoint="told")
    assert code == 0 and stderr.count("warning:") == 1
    assert "warning: no caption of the training data says 'zeppelin': this model does not know them" in stderr
    assert "warning:" not in run("--prompt", "A red seven", "--num_steps", "1", checkpoint="told")[2]
    manifest = tmp_path / "told" / "megadit.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"training": {"longest_caption": 3}}))
    long = run("--prompt", "a red seven " * 3, "--num_steps", "1", checkpoint="told")[2]
    assert "warning: a prompt has 9 words, and no caption of the training data more than 3" in long


def test_a_shape_far_from_training_is_warned_of(run):
    code, _, stderr = run("--prompt", "a", "--height", "64", "--num_steps", "1")
    assert code == 0 and "warning: 5 frames of 64x24 are far from this checkpoint's default" in stderr


def test_options_of_memory_change_nothing_else(run, tmp_path):
    one_frame = ["--prompt", "a", "--num_video_frames", "1", "--video_save_path"]
    assert run(*one_frame, "plain.png")[0] == 0
    assert run(*one_frame, "spared.png", "--sequential_guidance", "--offload_text_encoder")[0] == 0
    plain, spared = (read_video(f"{name}.png")[0].astype(int) for name in ("plain", "spared"))
    assert np.abs(plain - spared).max() <= 1


@pytest.mark.slow
def test_two_processes_and_both_names_write_the_same_bytes(bundle_dir, tmp_path):
    written = []
    for module in ("megadit.infer.generate.command", "megadit.infer.inference_dit_model"):
        command = [sys.executable, "-m", module, "--checkpoint_path", str(bundle_dir), "--seeds", "1", "2"]
        command += ["--prompt", "a red seven", "a two", "--video_save_path", module]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        files = {path.name: path.read_bytes() for path in sorted((tmp_path / module).iterdir())}
        assert len(files) == 8 and len(set(files.values())) == 8  # four videos that differ, and their settings
        written.append(files)
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("a.txt", "# a comment\na red seven\n\n  a blue two\n", ["a red seven", "a blue two"]),
        ("a", "a red seven", ["a red seven"]),
        ("a.json", '["a red seven", {"prompt": "a blue two", "seed": 3}]', ["a red seven", "a blue two"]),
        ("a.jsonl", '{"prompt": "# one"}\n', ["# one"]),
        ("a.json", '{"prompt": "a red seven"}', "must be a list"),
        ("a.json", "[3]", "number 1 must be an object"),
        ("a.json", "a red seven", "not valid JSON"),
        ("a.yaml", "- a red seven", ["a red seven"]),
        ("a.toml", "a red seven", "in a file that ends in .txt"),
    ],
)
def test_prompt_files_of_every_kind(tmp_path, name, text, prompts):
    (tmp_path / name).write_text(text)
    if isinstance(prompts, str):
        with pytest.raises(UserError, match=prompts):
            prompt_lines(str(tmp_path / name))
        return
    assert [line["prompt"] for line in prompt_lines(str(tmp_path / name))] == prompts


def test_files_of_several_scales_say_theirs(tmp_path):
    specs = [VideoSpec(prompt="a", seed=0, settings=replace(DEFAULTS, guidance=scale)) for scale in (2.0, 4.5)]
    names = [path.name for path in output_paths(str(tmp_path / "new"), [*specs, replace(specs[0], prompt="b")])]
    assert names == ["0000_a_guidance2_seed0.mp4", "0001_a_guidance4.5_seed0.mp4", "0002_b_seed0.mp4"]
