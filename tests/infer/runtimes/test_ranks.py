"""The command on several ranks makes the videos that one makes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megadit.infer.generate.command import main
from megadit.infer.media.video_io import read_video
from megadit.infer.runtimes.ranks import Ranks

from ..conftest import make_adapter

ARGUMENTS = ["--prompt", "a red seven", "a blue two", "a green three", "--seeds", "1", "2", "--format", "png"]


def command_of(bundle_dir, out: Path, *options: str, arguments=ARGUMENTS) -> list[str]:
    places = ["--checkpoint_path", str(bundle_dir), "--device", "cpu", "--video_save_path", str(out)]
    return ["-m", "megadit.infer.generate.command", *places, *arguments, *options]


@pytest.fixture
def generate(run_ranks, bundle_dir, tmp_path) -> Callable[..., list[str]]:
    """generate(4, "--cfg_parallel", ...): what each of four ranks printed, whose videos are in `tmp_path / "out"`."""
    return lambda count, *options, code=0, **settings: run_ranks(
        count, *command_of(bundle_dir, tmp_path / "out", *options, **settings), code=code
    )


def frames(folder: Path) -> dict[str, np.ndarray]:
    return {str(path.relative_to(folder)): read_video(path)[0] for path in sorted(folder.rglob("*.png"))}


@pytest.fixture(scope="module")
def alone(bundle_dir, tmp_path_factory) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("alone")
    arguments = ["--checkpoint_path", str(bundle_dir), "--device", "cpu", *ARGUMENTS]
    assert main([*arguments, "--video_save_path", str(folder)]) == 0
    return frames(folder)


def check_same(folder: Path, alone: dict[str, np.ndarray], count: int = 30) -> None:
    made = frames(folder)
    assert made.keys() == alone.keys() and len(made) == count
    for name, image in made.items():
        # Float32 sums in another order may cross the boundary between two of the 256 values.
        assert np.abs(image.astype(int) - alone[name]).max() <= 1, name


def test_jobs_are_dealt_out_in_equal_work():
    replicas = [Ranks(replica=replica, num_replicas=3, writes=True, passes=None) for replica in range(3)]
    assert [each.mine(range(7)) for each in replicas] == [[0, 3, 6], [1, 4], [2, 5]]
    work = [
        1,
        8,
        1,
        8,
        1,
        8,
        1,
        8,
        1,
        8,
    ]  # each second has guidance and more steps: taken in turn, one gets four dear ones
    dealt = [each.mine(range(10), work) for each in replicas]
    assert sorted(sum(dealt, [])) == list(range(10)) and all(own == sorted(own) for own in dealt)
    loads = [sum(work[place] for place in own) for own in dealt]
    assert max(loads) == 16, loads


@pytest.mark.slow
def test_guidance_split_over_two_ranks(bundle_dir, tmp_path, alone):
    """By torchrun; the tests below fork their ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, *command_of(bundle_dir, tmp_path / "out", "--cfg_parallel")]
    result = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) == 6 and result.stderr.count("sampling: 3/3") == 1
    check_same(tmp_path / "out", alone)


@pytest.mark.slow
def test_prompts_spread_over_replicas_of_split_guidance(generate, bundle_dir, tmp_path, alone):
    sheets = [tmp_path / name for name in ("sheet.png", "alone.png")]
    told = generate(4, "--cfg_parallel", "--contact_sheet", str(sheets[0]), "--num_devices", "4")
    paths = [line for output in told for line in output.splitlines() if line.startswith(str(tmp_path))]
    assert len(paths) == len(set(paths)) == 7
    check_same(tmp_path / "out", alone)
    assert len(list((tmp_path / "out").glob("*.json"))) == 6
    arguments = ["--checkpoint_path", str(bundle_dir), "--device", "cpu", *ARGUMENTS, "--video_save_path"]
    assert main([*arguments, str(tmp_path / "again"), "--contact_sheet", str(sheets[1])]) == 0
    ours, theirs = (read_video(path)[0].astype(int) for path in sheets)
    assert np.abs(ours - theirs).max() <= 1


@pytest.mark.slow
def test_tensor_parallel_ranks_and_split_guidance(generate, tmp_path, alone):
    pytest.importorskip("megatron.core")
    generate(4, "--tp_size", "2", "--cfg_parallel")
    check_same(tmp_path / "out", alone)


@pytest.mark.slow
def test_a_mistake_is_told_once(generate):
    told = "".join(generate(2, "--tp_size", "3", code=2))
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "2 processes cannot be divided into replicas of 3" in errors[0]


def test_the_record_tells_nothing_of_ranks(alone, bundle_dir, tmp_path):
    arguments = ["--checkpoint_path", str(bundle_dir), "--device", "cpu", "--prompt", "a", "--num_video_frames", "1"]
    assert main([*arguments, "--video_save_path", str(tmp_path / "a.png")]) == 0
    assert not {"tp_size", "cfg_parallel", "device"} & json.loads((tmp_path / "a.png.json").read_text()).keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "options"),
    [(2, ["--cp_size", "2"]), (4, ["--tp_size", "2", "--cp_size", "2"])],
    ids=["cp", "tp-cp"],
)
def test_context_parallel_ranks_make_videos_of_several_shapes_in_turn(
    generate, bundle_dir, tmp_path, num_processes, options
):
    """One process, one video at a time: what it keeps of the layout of one shape is not used for the next."""
    pytest.importorskip("megatron.core")
    shapes = [(5, 16, 24), (1, 16, 16), (9, 24, 16), (5, 16, 24), (1, 16, 16), (9, 24, 16)]
    names = ("num_frames", "height", "width")
    lines = [{"prompt": f"a {n}", **dict(zip(names, shape, strict=True))} for n, shape in enumerate(shapes)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--prompt_file", str(tmp_path / "prompts.jsonl"), "--batch_size", "1", "--format", "png"]
    command = ["--checkpoint_path", str(bundle_dir), "--device", "cpu", *arguments]
    assert main([*command, "--video_save_path", str(tmp_path / "alone")]) == 0
    generate(num_processes, *options, arguments=arguments)
    check_same(tmp_path / "out", frames(tmp_path / "alone"), count=2 * sum(shape[0] for shape in shapes[:3]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "options"),
    [(2, ["--tp_size", "2"]), (4, ["--tp_size", "2", "--cp_size", "2"])],
    ids=["tp", "tp-cp"],
)
def test_each_video_of_a_batch_has_its_adapters_on_ranks_that_share_it(
    generate, bundle_dir, tmp_path, num_processes, options
):
    """LoRA and DoRA beside every linear, other scales for each prompt."""
    pytest.importorskip("megatron.core")
    lora, dora = (make_adapter(tmp_path / kind, bundle_dir, 1, kind=kind) for kind in ("lora", "dora"))
    asked = {"a red seven": [f"{lora}:0.7"], "a blue two": [f"{lora}:0.3", f"{dora}:0.8"], "a green three": []}
    lines = [json.dumps({"prompt": prompt, "adapter": adapters}) for prompt, adapters in asked.items()]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    arguments = ["--prompt_file", str(tmp_path / "prompts.jsonl"), *ARGUMENTS[4:]]
    command = ["--checkpoint_path", str(bundle_dir), "--device", "cpu", *arguments]
    assert main([*command, "--video_save_path", str(tmp_path / "alone")]) == 0
    generate(num_processes, *options, arguments=arguments)
    check_same(tmp_path / "out", frames(tmp_path / "alone"))
