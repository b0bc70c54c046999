"""`megadit new`: folders as people have them become runs that this machine can do."""

import csv
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml

from megadit.infer.media.video_io import read_video, write_video
from megadit.models.shared.cli import verbs
from megadit.models.shared.cli.command import run_module
from megadit.models.shared.errors import UserError
from megadit.train.data.ingest.clips.probe import Seen, summarize
from megadit.train.new import command as new
from megadit.train.new.command import main
from megadit.train.new.proposal import CPU, GPU, choose_length, choose_sizes
from megadit.train.plan.hardware import Gpu
from tests.train.conftest import FEW_STEPS

CORE = Gpu(
    name="a core",
    memory=16 * 2**30,
    bf16_flops=1e11,
    memory_bandwidth=1e10,
    link_bandwidth=2e9,
    network_bandwidth=2e9,
    is_cpu=True,
)
COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 230)}


@pytest.fixture(autouse=True)
def same_machine(monkeypatch):
    """Whatever else keeps this one busy, and however fast it is: two such cores. Reports are not drawn."""
    monkeypatch.setattr(new, "this_device", lambda ranks: CORE)
    monkeypatch.setattr("megadit.models.shared.resources.available_cores", lambda: 2)
    monkeypatch.setattr("megadit.train.data.ingest.report.draw", lambda *asked: None)


def clip(number, *, frames, height, width):
    """A coloured square that moves over a plain ground, each its own way."""
    video = np.full((frames, height, width, 3), 20 + 9 * number % 60, np.uint8)
    side = max(6, height // 4)
    for t in range(frames):
        y = (number * 7 + t * (number % 3)) % (height - side)
        x = (number * 13 + t * (1 + number % 4) * 2) % (width - side)
        video[t, y : y + side, x : x + side] = list(COLOURS.values())[number % 3]
    return video


def caption(number):
    return f"a {list(COLOURS)[number % 3]} square moving, number {number}"


def few(root):
    """Three captioned clips."""
    for number in range(3):
        write_video(root / f"{number}.mp4", clip(number, frames=24, height=64, width=64), 12)
        (root / f"{number}.txt").write_text(caption(number))


def many(root):
    """Enough to hold some out, without captions."""
    for number in range(24):
        write_video(root / f"{number:03d}.mp4", clip(number, frames=20, height=48, width=80), 24)


def images(root):
    for number in range(24):
        write_video(root / f"{number:03d}.png", clip(number, frames=1, height=96, width=72 + 8 * (number % 3)))
        (root / f"{number:03d}.txt").write_text(caption(number))


def mixed(root):
    """Two shapes, three lengths, captions in a table, and a file that is no video."""
    rows = []
    for number in range(24):
        height, width = ((64, 64), (48, 88))[number % 2]
        name = f"clips/{number:03d}.mp4"
        write_video(root / name, clip(number, frames=(18, 24, 40)[number % 3], height=height, width=width), 10)
        rows.append({"file_name": name, "caption": caption(number)})
    (root / "clips" / "broken.mp4").write_text("no video")
    rows.append({"file_name": "clips/broken.mp4", "caption": "nothing"})
    with (root / "metadata.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["file_name", "caption"])
        table.writeheader()
        table.writerows(rows)


KINDS = {each.__name__: each for each in (few, many, images, mixed)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    root = tmp_path_factory.mktemp(request.param) / "mine"
    root.mkdir()
    KINDS[request.param](root)
    return root


def proposed(capsys, *argv):
    """(the commands, what was printed) of a proposal."""
    assert main([*map(str, argv)]) == 0
    shown = capsys.readouterr().out
    commands = [shlex.split(line)[1:] for line in re.findall(r"^    (megadit .*)$", shown, re.MULTILINE)]
    assert [command[0] for command in commands] == ["prepare", "train", "bundle", "generate"]
    return commands, shown


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_what_is_proposed_passes_a_dry_run(folder, tmp_path, capsys):
    """For this machine: prepared, read, compared with its memory."""
    commands, _ = proposed(capsys, folder, "--out", tmp_path / "out")
    assert verbs.main([*commands[0], "--num_workers", "0"]) == 0
    capsys.readouterr()
    assert verbs.main([*commands[1], "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "memory of a rank" in shown and not re.search("note: (a token|a rank)", shown)


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_what_is_proposed_for_an_h200_fits_it(folder, tmp_path, capsys):
    commands, shown = proposed(capsys, folder, "--out", tmp_path / "out", "--gpu", "h200", "--gpus", "2")
    assert "2 x h200-141gb" in shown and commands[1][-2:] == ["--nproc", "2"]
    run = yaml.safe_load((tmp_path / "out" / "run.yaml").read_text())
    tokens = min(math.prod(shape) for shape in run["data"]["mock_latent_shapes"]) // run["model"]["patch_spatial"] ** 2
    assert run["parallel"]["cuda_graph_max_segments"] > run["data"]["seq_length"] // tokens, "any pack may be replayed"
    assert run["parallel"]["recompute_granularity"] == "none"
    assert verbs.main([*commands[1], "--mock", "--dry-run", "--gpu", "h200"]) == 0
    assert "estimated on h200-141gb" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["mixed"], indirect=True)
def test_options_reach_the_proposal(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").symlink_to(folder)
    commands, shown = proposed(capsys, "mine")
    assert Path("runs/mine/run.yaml").is_file() and "25 videos, 25 with captions" in shown and "1 broken" in shown
    assert commands[0][commands[0].index("--sizes") + 1] == "48x88,64x64"
    run = yaml.safe_load(Path("runs/mine/run.yaml").read_text())
    assert run["recipe"] == "digits" and run["data"]["path"] == "runs/mine/data"
    assert run["validation"]["sampling"]["guidance"] == 3.0
    again, shown = proposed(capsys, "mine")
    assert "is there already" in shown and again == commands

    table = tmp_path / "other.csv"
    table.write_text("file_name,caption\nclips/000.mp4,only this\nclips/002.mp4,and that\n")
    commands, shown = proposed(capsys, "mine", "--captions", table, "--out", "other", "--minutes", "1")
    assert "2 videos, 2 with captions" in shown and commands[0][-2:] == ["--captions", str(table)]
    assert commands[3][commands[3].index("--prompt") + 1] == "only this"
    one = yaml.safe_load(Path("other/run.yaml").read_text())
    assert 3 * one["train"]["train_iters"] < run["train"]["train_iters"] and one["data"]["use_train_split_for_val"]

    proposed(capsys, "mine", "--out", "big", "--gpu", "b200", "--gpus", "8")
    big = yaml.safe_load(Path("big/run.yaml").read_text())
    assert "cuda_graph_max_segments" not in run.get("parallel", {}), "a CPU replays nothing"
    assert big["recipe"] == "dit_pretrain" and big["data"]["global_batch_size"] % 8 == 0
    assert main(["mine", "--out", "x", "--gpu", "b200", "--go"]) == 2
    assert "--go runs here" in capsys.readouterr().err


ALONE = {"prepare": ("--num_workers", "0"), "train": (*FEW_STEPS, "train.num_threads=1", "model.num_layers=1")}
"""Command -> what keeps it small, and from starting processes of its own."""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_modules")
@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_what_is_proposed_becomes_a_model(folder, tmp_path, capfd, monkeypatch):
    """All four commands, on one rank without processes of its own; of training and sampling a few steps."""
    monkeypatch.setattr(new, "ranks_that_gain", lambda: 1)
    monkeypatch.setattr(new, "run_module", lambda *words: run_module(*words, *ALONE.get(words[1], ())))
    out = tmp_path / "out"
    assert main([str(folder), "--out", str(out)]) == 0
    text = re.sub(r"(iters|interval|num_steps): \d+", r"\1: 2", (out / "run.yaml").read_text())
    (out / "run.yaml").write_text(text.replace("lr_warmup_iters: 2", "lr_warmup_iters: 1"))
    assert main([str(folder), "--out", str(out), "--go"]) == 0
    shown = capfd.readouterr().out
    assert "validation at step 2" in shown and "done: 2 of 2 steps" in shown
    assert (out / "bundle" / "megadit.json").is_file()
    (made,) = (path for path in (out / "video.mp4", out / "picture.png") if path.is_file())
    run = yaml.safe_load(text)
    frames, *_ = read_video(made)
    sizes = [tuple(8 * side for side in shape[1:]) for shape in run["data"]["mock_latent_shapes"]]
    assert frames.shape[1:3] in sizes and (len(frames) == 1) == (made.suffix == ".png")
    assert (made.suffix == ".png") == (folder_kind(shown) == "images")


def folder_kind(shown):
    """ "videos" or "images": what a folder was found to hold."""
    return re.search(r"\d+ (videos|images), ", shown)[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "holds neither videos (.mp4, "),
        (lambda root: (root / "a.mp4").write_text("no video"), "none of 1 videos"),
        (lambda root: write_video(root / "a.mp4", clip(0, frames=3, height=64, width=64), 8), "fewer than 5 frames"),
        (
            lambda root: write_video(root / "a.mp4", clip(0, frames=9, height=64, width=64)[:, :6], 8),
            "smaller than 8 x 8",
        ),
    ],
)
def test_folders_that_give_nothing(make, message, tmp_path, capsys):
    root = tmp_path / "mine"
    root.mkdir()
    make(root)
    assert main([str(root), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()
    assert main([str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize("folder", list(KINDS)[:1], indirect=True)
def test_a_run_is_not_written_among_its_sources(folder, capsys):
    before = sorted(folder.iterdir())
    assert main([str(folder), "--out", str(folder)]) == 2
    assert f"--out={folder} is the folder of the sources" in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


def seen(height, width, *, fps=24.0, frames=100):
    return Seen(height=height, width=width, fps=fps, frames=frames)


def test_sizes_are_those_that_most_fill():
    assert choose_sizes([seen(480, 640)] * 9 + [seen(64, 64)], CPU) == ((56, 72),)
    assert choose_sizes([seen(1080, 1920), seen(1920, 1080)], GPU) == ((192, 336), (336, 192))
    assert choose_sizes([seen(40, 40)] * 3, CPU) == ((40, 40),)
    with pytest.raises(UserError, match="smaller than 16 x 16"):
        choose_sizes([seen(12, 12)], GPU)


def test_clips_are_as_long_as_most_videos():
    assert choose_length([seen(64, 64)] * 4, CPU) == (17, 8.0)
    assert choose_length([seen(64, 64, frames=30)] * 4, CPU) == (9, 7.2), "all of them"
    assert choose_length([seen(64, 64, frames=20)] * 4, CPU) == (17, 20.4)
    assert choose_length([seen(64, 64, fps=5.0, frames=10)] * 4, CPU) == (9, 4.5)
    assert choose_length([seen(64, 64, fps=120.0, frames=480)] * 4, CPU) == (17, 8.0)
    assert choose_length([seen(64, 64, fps=120.0, frames=120)] * 4, CPU) == (17, 17.0), "a second of it"
    assert choose_length([seen(64, 64, fps=120.0, frames=30)] * 4, CPU) == (13, 52.0)


def test_pictures_that_move_are_videos(tmp_path):
    (tmp_path / "still.png").write_bytes(b"")
    write_video(tmp_path / "a.gif", clip(0, frames=9, height=64, width=64), 10)
    found = summarize(str(tmp_path))
    assert (found.kind, found.count, found.seen[0].frames) == ("video", 1, 9)


def test_videos_of_many_frames_a_second_are_looked_at_for_long_enough(tmp_path):
    for number in range(2):
        write_video(tmp_path / f"{number}.mp4", clip(number, frames=300, height=32, width=32), 120)
    found = summarize(str(tmp_path))
    assert [(one.fps, one.frames) for one in found.seen] == [(120, 300)] * 2
    assert choose_length(found.seen, CPU) == (17, 6.8) and choose_length(found.seen, GPU) == (33, 13.2)
