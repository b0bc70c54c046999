"""Random command lines through the real parser: each ends in whole files or in an error of one line."""

import json
import random
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megadit.infer.generate.command import main
from megadit.infer.generate.options import GenerateOptions
from megadit.infer.media.video_io import read_video
from megadit.infer.runtimes.options import RuntimeOptions
from megadit.models.bundle import Bundle
from megadit.models.diffusion.settings import PartialSettings
from megadit.models.shared.cli.setting import settings_of

from .conftest import make_adapter

SECONDS = 240
"""After which a command counts as hanging."""

NUMBERS = ["0", "1", "2", "3", "0.5", "1.5", "-1", "7", "1e9", "1e-9", "nan", "inf", "-inf", "auto", "", "x", "0x10"]
COUNTS = ["1", "1", "2", "3", "4", "5", "8", "0", "-2", "2.5", "1000000000", "99999999999999999999", "", "many"]
SIZES = ["16", "24", "32", "4", "20", "18", "0", "-4", "100000000", "16.0", ""]
TEXTS = ["a red seven", "", " ", "{subject}", "日本語 🎬", "a\nb", "../../x", "-", "x" * 4000, "\udcff", "%s {} \\n"]
PATHS = ["", "nowhere", "nowhere.mp4", ".", "given.mp4", "given.gif", "given.png", "broken.mp4", "prompts.txt"]
OUTPUTS = ["out", "out.mp4", "out.gif", "out.webp", "out.png", "out.jpg", "out.avi", "a/b/c",
           "out.safetensors", "x.MP4", "prompts.txt", "/dev/null/x", ".", "out\0", "🎬.mp4", "\udcff.mp4",
           "y" * 300]  # fmt: skip


def several(values: list[str], most: int = 3):
    return lambda choose: [choose(values) for _ in range(choose(range(1, most + 1)))]


def one(values: list[str]):
    return lambda choose: [choose(values)]


OPTIONS = {
    "prompt": several(TEXTS),
    "prompt_file": one(["prompts.txt", "prompts.jsonl", "bad.jsonl", "binary.txt", "nowhere.txt", ".", ""]),
    "adapter": one(["adapter", "adapter:0.5", "adapter:0", "adapter:-2", "adapter:inf", "nowhere:1", "bundle"]),
    "adapter_interval": lambda choose: [choose(NUMBERS), choose(NUMBERS), "--adapter", "adapter"],
    "subject_name": one(TEXTS),
    "seed": one(["0", "1", "-5", "123456789012345678901234567890", "1.5", "x"]),
    "seeds": several(["0", "1", "2", "-1", "x"]),
    "num_video_frames": one(COUNTS),
    "num_frames": one(COUNTS),
    "height": one(SIZES),
    "width": one(SIZES),
    "fps": one(["8", "12.5", "0", "-1", "1000", "1e9", "nan", "inf", "1e-9"]),
    "input_video": one(PATHS),
    "strength": one(NUMBERS),
    "continue_video": one(PATHS),
    "lead_to_video": one(PATHS),
    "image": one(PATHS),
    "first_frame": one(PATHS),
    "conditioned_image_or_video_path": one(PATHS),
    "last_image": one(PATHS),
    "last_frame": one(PATHS),
    "keyframe": one(["0:given.png", "3:given.gif", "99:given.gif", "given.gif", ":", "-1:given.gif", "1e9:x"]),
    "video": one(PATHS),
    "mask": one(PATHS),
    "instruction": one(TEXTS),
    "image_guidance": one(NUMBERS),
    "low_guidance": one(NUMBERS),
    "dry_run": lambda choose: [],
    "device_memory": one(NUMBERS),
    "even_if_too_large": lambda choose: [],
    "recorded_files": lambda choose: [],
    "total_frames": one(["9", "17", "40", "0", "-2", "2.5", "", "many"]),  # any number is made, however long it takes
    "story": lambda choose: [],
    "keep_first": lambda choose: [],
    "keep_frames": one(COUNTS),
    "negative_prompt": one(TEXTS),
    "guidance": one(NUMBERS),
    "guidances": several(NUMBERS[:8]),
    "guidance_convention": one(["standard", "nemo", "dfm"]),
    "guidance_interval": several(NUMBERS, 2),
    "guidance_rescale": one(NUMBERS),
    "autoguidance": one(["bundle", "nowhere", "."]),
    "second_prompt": one(TEXTS),
    "second_guidance": one(NUMBERS),
    "sampler": one(["euler", "HEUN", "dpm2", "dpmpp_2m", "dpmpp-3m", "RES", "unipc", "ddim", ""]),
    "num_steps": one(COUNTS),
    "schedule": one(["karras", "log_linear", "exponential", "linear", "cosine"]),
    "sigmas": several(["20", "5", "1", "0.1", "0", "-1", "nan", "inf"], 4),
    "sigma_min": one(NUMBERS),
    "sigma_max": one(NUMBERS),
    "rho": one(NUMBERS),
    "shift": one(NUMBERS),
    "noise_scale": one(NUMBERS),
    "churn": one(NUMBERS),
    "churn_interval": several(NUMBERS, 2),
    "eta": one(NUMBERS),
    "cache_budget": one(NUMBERS),
    "cache_measure": one(["latents", "lpips", "looks"]),
    "lpips_weights": one(["nowhere", "."]),
    "cuda_graphs": lambda choose: [],
    "overlap_decoding": lambda choose: [],
    "resident_blocks": lambda choose: [choose(("0", "1", "2", "99"))],
    "tp_size": one(["1", "2", "0", "-1"]),
    "cfg_parallel": lambda choose: [],
    "video_save_path": one(OUTPUTS),
    "format": one(["mp4", "gif", "webp", "png", "jpg", "safetensors", "avi"]),
    "contact_sheet": one(["sheet.png", "sheet.mp4", "sheet.gif", "sheet.txt", "a/sheet.jpg"]),
    "batch_size": one(COUNTS),
    "dtype": one(["float32", "bf16", "float16", "int8"]),
    "sequential_guidance": lambda choose: [],
    "offload_text_encoder": lambda choose: [],
    "tokenizer_model": one(["tokenizer", "nowhere"]),
    "tokenizer_cache_dir": one(["bundle", "nowhere"]),
    "t5_cache_dir": one(["bundle/text_encoder", "nowhere"]),
    "num_devices": one(["1", "2"]),
    "cp_size": one(["1", "2"]),
    "runtime": one(["torch", "onnx", "onnx_tensorrt", "openvino", "tensorrt", "remote"]),
    "guardrail_dir": one(["guards"]),
    "repeat": one(["given.mp4", "given.gif", "made.mp4", "broken.mp4", "nowhere.json", "."]),
    "nonsense": one(["1"]),
    "num_step": one(["3"]),
}


def test_every_option_is_drawn():
    # the first two are part of every command; compiling a network takes too long to do it hundreds of times
    known = settings_of(GenerateOptions).keys() | settings_of(PartialSettings).keys()
    running = settings_of(RuntimeOptions).items()
    known |= {(about.names or (name,))[0].removeprefix("--") for name, about in running}
    assert known - OPTIONS.keys() == {"checkpoint_path", "device", "compile"}


def random_command(choose: random.Random) -> list[str]:
    """Mostly right at first sight: half of the commands have at most two options beside the prompt."""
    pick = choose.choice
    arguments = [["--checkpoint_path", "bundle"]] if choose.random() < 0.97 else []
    if choose.random() < 0.93:
        arguments.append(["--prompt", *several(TEXTS[:1] if choose.random() < 0.7 else TEXTS)(pick)])
    if choose.random() < 0.9:
        arguments.append(["--num_steps", pick(["1", "2", "3"])])
    names = choose.sample(sorted(OPTIONS), k=pick([0, 1, 1, 2, 2, 3, 5, 8]))
    arguments += [[f"--{name}", *OPTIONS[name](pick)] for name in names]
    choose.shuffle(arguments)
    command = [argument for group in arguments for argument in group]
    return command[: choose.randrange(len(command) + 1)] if choose.random() < 0.03 else command


@contextmanager
def time_limit(seconds: int):
    def stop(*_):
        raise TimeoutError(f"no end after {seconds} seconds")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def furnish(folder: Path, bundle_dir: Path) -> None:
    (folder / "bundle").symlink_to(bundle_dir)
    make_adapter(folder / "adapter", bundle_dir, 1)
    (folder / "prompts.txt").write_text("one\n\ntwo\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "one", "num_frames": 1}\n{"prompt": "two", "seed": 7}\n')
    (folder / "bad.jsonl").write_text('{"prompt": "one", "num_steps": "many"}\n')
    (folder / "binary.txt").write_bytes(bytes(range(256)))
    (folder / "broken.mp4").write_bytes(b"not a video")
    for name in ("given.mp4", "given.gif", "made.mp4"):
        assert (
            main(["--checkpoint_path", "bundle", "--prompt", "a", "--num_steps", "1", "--video_save_path", name]) == 0
        )
    image = ["--num_video_frames", "1", "--video_save_path", "given.png"]
    assert main(["--checkpoint_path", "bundle", "--prompt", "a", "--num_steps", "1", *image]) == 0


def check_files(folder: Path, before: set[Path]) -> None:
    """Whatever is new is whole, and has its settings beside it."""
    for path in sorted(set(folder.rglob("*")) - before):
        assert not path.name.startswith("."), path  # temporary names
        if path.is_dir():
            continue
        if path.suffix == ".json":
            assert json.loads(path.read_text())["prompt"] is not None
        elif path.suffix == ".safetensors":
            assert load_file(path)["latents_CTHW"].isfinite().all()
        else:
            assert read_video(path)[0].size


def run_command(command: list[str], folder: Path, before: set[Path], capsys) -> int:
    with time_limit(SECONDS):
        code = main([*command, "--device", "cpu"])
    stdout, stderr = capsys.readouterr()
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    known = ("error: ", "warning: ", "sampling: ")
    noise = [line for line in stderr.splitlines() if not line.startswith(known) and "tensors are used" not in line]
    assert not noise and "Traceback" not in stderr, stderr
    assert (code, len(errors)) in ((0, 0), (2, 1)), stderr
    if code == 0:
        is_plan = not {"--dry_run", "--dry-run"}.isdisjoint(command)
        assert "largest" in stdout if is_plan else all(Path(line).exists() for line in stdout.splitlines()), stdout
        assert stdout
    check_files(folder, before)
    return code


@pytest.mark.parametrize("count", [80, pytest.param(300, marks=pytest.mark.slow)])
def test_random_command_lines(bundle_dir, tmp_path, monkeypatch, capsys, count):
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path, bundle_dir)
    capsys.readouterr()
    before = set(tmp_path.rglob("*"))
    choose, made = random.Random(count), 0
    for number in range(count):
        command = random_command(choose)
        try:
            made += run_command(command, tmp_path, before, capsys) == 0
        except BaseException as error:
            raise AssertionError(f"command {number}: {command}") from error
        for path in set(tmp_path.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    Bundle.open(bundle_dir, verify=True)
    # Both kinds of ending are tried.
    assert count * 0.15 < made < count * 0.8, made
