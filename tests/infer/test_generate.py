import json
import subprocess
import sys

import numpy as np
import pytest

from megadit.infer import generate
from megadit.infer.generate import main, output_paths
from megadit.infer.video_io import read_video
from megadit.models.support import UserError


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
    settings = json.loads((tmp_path / "seven.json").read_text())
    expected = {
        "prompt": "a red seven", "seed": 5, "fps": 12, "num_frames": 7, "height": 32, "width": 36, "num_steps": 2,
        "sampler": "heun", "guidance": 3, "negative_prompt": "blue", "sigma_max": 20,
    }  # fmt: skip
    assert settings.items() >= expected.items()
    names = ("num_frames", "height", "width", "num_steps", "sampler", "guidance", "negative_prompt", "fps")
    (same,) = pipeline.generate(["a red seven"], seeds=5, **{name: settings[name] for name in names})
    # Random weights give noise, of which H.264 keeps the brightness best (measured 0.86; another seed gives 0.2).
    assert np.corrcoef(same.video.mean(-1).ravel(), frames.mean(-1).ravel())[0, 1] > 0.8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seven.json", "seven.mp4"]


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
    assert files == {"prompts.txt"} | {f"outputs/{name}.{suffix}" for name in names for suffix in ("mp4", "json")}


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_one_frame_makes_an_image(run, suffix):
    assert run("--prompt", "a red seven", "--num_video_frames", "1", "--video_save_path", f"seven.{suffix}")[0] == 0
    frames, fps = read_video(f"seven.{suffix}")
    assert frames.shape == (1, 16, 24, 3) and fps == 0


def test_one_frame_into_a_directory_is_a_png_equal_to_the_pipelines(run, pipeline):
    assert run("--prompt", "a red seven", "--num-video-frames", "1", "--video-save-path", "images")[0] == 0
    frames, _ = read_video("images/0000_a-red-seven_seed0.png")
    (same,) = pipeline.generate(["a red seven"], num_frames=1)
    assert np.array_equal(frames, same.video)


def test_subject_name_fills_its_place(run, tmp_path):
    base = ["--num_video_frames", "1", "--video_save_path"]
    assert run("--prompt", "a red {subject}", "--subject_name", "seven", *base, "subject.png")[0] == 0
    assert run("--prompt", "a red seven", *base, "plain.png")[0] == 0
    assert (tmp_path / "subject.png").read_bytes() == (tmp_path / "plain.png").read_bytes()
    assert json.loads((tmp_path / "subject.json").read_text())["prompt"] == "a red seven"


def test_copies_of_tokenizer_and_text_encoder(run, bundle_dir):
    copies = ["--tokenizer_cache_dir", str(bundle_dir), "--tokenizer_model", "tokenizer"]
    assert run("--prompt", "a", *copies, "--t5_cache_dir", str(bundle_dir / "text_encoder"))[0] == 0


def test_batch_size_and_dtype_reach_the_pipeline(run):
    *_, stderr = run("--prompt", "a", "b", "c", "--batch_size", "2", "--video_save_path", "out")
    assert "sampling: 6/6" in stderr  # two batches of three steps
    *_, stderr = run("--prompt", "a", "b", "c", "--dtype", "bf16", "--video_save_path", "out")
    assert "sampling: 3/3" in stderr
    with open("out/0000_a_seed0.json") as file:
        assert json.load(file)["dtype"] == "bf16"


MISTAKES = [
    ([], "no prompt"),
    (["--prompt_file", "nowhere.txt"], "cannot read --prompt_file nowhere.txt"),
    (["--prompt", "a", "--num_steps", "0"], "num_steps=0 must be greater than 0"),
    (["--prompt", "a", "--num_video_frames", "-3"], "--num_video_frames=-3 must be greater than 0"),
    (["--prompt", "a", "--num_stepz", "3"], "unknown argument '--num_stepz' (did you mean --num_steps?)"),
    (["--prompt", "a", "--num_step", "3"], "did you mean --num_steps?"),
    (["--prompt", "a", "--num_steps", "many"], "argument --num_steps: invalid int value: 'many'"),
    (["--prompt", "a", "--num_steps"], "argument --num_steps: expected one argument"),
    (["--prompt", "a", "--guidance_convention", "cosmos"], "invalid choice: 'cosmos' (choose from"),
    (["--seeds", "1", "--prompt"], "argument --prompt: expected at least one argument"),
    (["--prompt", "a", "--fps", "0"], "fps=0"),
    (["--prompt", "a", "--batch_size", "0"], "--batch_size=0"),
    (["--prompt", "a", "--height", "18"], "height=18 is not a multiple of 4; use 16 or 20"),
    (["--prompt", "a", "--sampler", "DDIM"], "sampler 'DDIM' is not available; choose one of euler, heun, dpm2"),
    (["--prompt", "a", "--seed", "1", "--seeds", "2"], "not both"),
    (["--prompt", "a", "--guidance_convention", "nemo"], "give that too"),
    (["--prompt", "a", "--num_devices", "2"], "one process for each device"),
    (["--prompt", "a", "--cp_size", "2"], "--cp_size=2"),
    (["--prompt", "a", "--guardrail_dir", "guards"], "no guardrails here"),
    (["--prompt", "a", "--tokenizer_cache_dir", "cache"], "needs --tokenizer_model"),
    (["--prompt", "a", "--tokenizer_model", "nowhere"], "nowhere/config.json does not exist"),
    (["--prompt", "a", "--t5_cache_dir", "nowhere"], "nowhere/config.json does not exist"),
    (["--prompt", "a {subject}"], "--subject_name"),
    (["--prompt", "a", "--subject_name", "robot"], "{subject}"),
    (["--prompt", "a", "--dtype", "int8"], "dtype 'int8' is unknown"),
    (["--prompt", "a", "--device", "abacus"], "device 'abacus' cannot be used"),
    (["--prompt", "a", "--device", "meta"], "device 'meta' cannot be used"),
    (["--prompt", "a", "--device", "cuda:99"], "device 'cuda:99' is not there"),
    (["--prompt", "a", "--video_save_path", "a.gif"], "cannot write .gif"),
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


def test_names_never_leave_the_directory(tmp_path):
    prompts = ["../../etc/passwd", "/etc/passwd", "..", "", "a\0b\n", "日本", "x" * 300]
    paths = output_paths(str(tmp_path / "out"), [(prompt, 0) for prompt in prompts], num_frames=5)
    assert len(set(paths)) == len(prompts)
    for path in paths:
        assert path.parent == tmp_path / "out" and len(path.name) < 80
        path.touch()


def test_several_videos_beside_a_file_name(tmp_path):
    paths = output_paths(str(tmp_path / "new/clip.mp4"), [("a", 0), ("b", 0)], num_frames=5)
    assert paths == [tmp_path / "new/clip_0000.mp4", tmp_path / "new/clip_0001.mp4"]


def test_an_existing_directory_may_have_any_name(tmp_path):
    (tmp_path / "videos.mp4").mkdir()
    (path,) = output_paths(str(tmp_path / "videos.mp4"), [("a", 0)], num_frames=5)
    assert path.parent == tmp_path / "videos.mp4"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["megadit.infer.generate", "megadit.infer.inference_dit_model"])
def test_as_a_module(bundle_dir, tmp_path, module):
    command = [sys.executable, "-m", module, "--checkpoint_path", str(bundle_dir), "--prompt", "a red seven"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert read_video(tmp_path / result.stdout.strip())[0].shape == (5, 16, 24, 3)
