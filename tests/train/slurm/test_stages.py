"""Stages of any name and order, arrays, what ran and what runs again; the same chain on Slurm and on this machine."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megadit.models.shared.errors import UserError
from megadit.train.config.load import change
from megadit.train.slurm.__main__ import SlurmOptions, _chosen, main
from megadit.train.slurm.config import ChainConfig

from ..conftest import FEW_STEPS

HERE = ("cluster.gpus_per_node=0",)


def submitted(slurm) -> list[list[str]]:
    return [line.split() for line in (slurm / "sbatch.log").read_text().splitlines()]


def test_each_stage_waits_for_those_it_names(slurm, diamond, ran):
    assert main(diamond) == 0
    waits = {stage: [word for word in options if "dependency" in word] for _, stage, *options in submitted(slurm)}
    assert waits == {
        "first": [],
        "left": ["--dependency=afterok:1001"],
        "right": ["--dependency=afterok:1001"],
        "last": ["--dependency=afterok:1002:1003"],
    }
    assert ran() == ["first/0", "left/0", "right.0/3", "right.1/3", "right.2/3", "last/0"]


def test_only_what_failed_runs_again(slurm, diamond, ran, tmp_path, capsys):
    """Of an array the task that did, and what was cancelled for it."""
    (tmp_path / "right.1.fails").touch()
    assert main(diamond) == 0
    assert "last/0" not in ran()
    capsys.readouterr()
    assert main(["status", *diamond]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "first: ended well [job 1001]",
        "left: ended well [job 1002]",
        "right: 2 ended well, 1 ended with an error (tasks 1) [job 1003]",
        "last: ended without a word: killed, or its node died, or it was cancelled as one before it failed [job 1004]",
    ]
    (tmp_path / "right.1.fails").unlink()
    assert main([*diamond, "--failed"]) == 0
    assert [options[:2] for options in submitted(slurm)[4:]] == [["1005", "right"], ["1006", "last"]]
    assert "--array=1" in submitted(slurm)[4] and "--dependency=afterok:1005" in submitted(slurm)[5]
    assert Counter(ran())["right.1/3"] == 2 and max(Counter(set(ran()) - {"right.1/3"}).values()) == 1
    assert main([*diamond, "--failed"]) == 0
    assert "nothing to do" in capsys.readouterr().out and len(submitted(slurm)) == 6


def test_a_stage_alone_waits_for_what_is_in_the_queue(slurm, diamond, ran):
    assert main([*diamond, "--stages", "first,right"]) == 0
    assert main([*diamond, "--stages", "left"]) == 0
    (slurm / "queued").write_text("1002")  # right, as if it ran
    assert main([*diamond, "--stages", "last"]) == 0
    assert "--dependency=afterok:1002" in submitted(slurm)[-1]
    assert not any("dependency" in word for word in submitted(slurm)[-2])
    assert ran()[-1] == "last/0"


def test_status_asks_the_queue_about_the_silent(slurm, diamond, tmp_path, capsys):
    assert main([*diamond, "--dry-run"]) == 0
    folder = tmp_path / "chain"
    (folder / "state").mkdir(exist_ok=True)
    (folder / "jobs").write_text("first 7\nleft 8\nright 9\n")
    (slurm / "queued").write_text("8 9")
    (folder / "state" / "first").write_text("running 7\n")  # its node died
    (folder / "state" / "left").write_text("running 8\n")
    capsys.readouterr()
    assert main(["status", *diamond]) == 0
    first, left, right, last = capsys.readouterr().out.splitlines()
    assert first.startswith("first: ended without a word") and left == "left: running [job 8]"
    assert right == "right: 3 in the queue [job 9]" and last == "last: not submitted"


def test_the_picture_has_a_box_for_each_stage_and_an_arrow_for_each_need(diamond, tmp_path, capsys):
    assert main([*diamond, "--dry-run"]) == 0
    assert "last: 1 node, 4:00:00; after left, right" in capsys.readouterr().out
    picture = ElementTree.fromstring((tmp_path / "chain" / "chain.svg").read_text())
    space = "{http://www.w3.org/2000/svg}"
    words = [text.text for text in picture.iter(f"{space}text")]
    assert words[::2] == ["first", "left", "right", "last"] and "1 node, 3 tasks, 4:00:00" in words
    assert sum("marker-end" in path.attrib for path in picture.iter(f"{space}path")) == 4
    boxes = [(rect.get("x"), rect.get("y")) for rect in picture.iter(f"{space}rect")]
    assert len(set(boxes)) == 4 and len({x for x, _ in boxes}) == 3  # left and right stand one above the other


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stages.a.command=ls", "stages.a.after=[b]", "stages.b.command=ls"], "'b' is no stage above it"),
        (["stages.a.command=ls", "stages.a.after=[a]"], "is no stage above it"),
        (["stages.a.command=ls", "stages.b.after=[aa]", "stages.b.command=ls"], "did you mean 'a'"),
        (["stages.a.array=0-9"], "stages.a has nothing to run"),
        (["stages.a.command=ls", "stages.a.array=1-9"], "write 0-99"),
        (["stages.a.command=ls", "stages.a.nodse=2"], r"unknown key stages.a.nodse; did you mean stages.NAME.nodes"),
        (["stages.a.b.command=ls"], "unknown key stages.a.b"),
        (["stages.a=true"], "stages.a holds several keys"),
        (["train.command=ls"], "unknown key train.command; did you mean stages.NAME.command"),
        (["stages='a b'"], "stages"),
    ],
)
def test_a_chain_that_cannot_be_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        change(ChainConfig(), overrides=overrides).check()


def test_a_name_is_no_path(tmp_path):
    config = tmp_path / "chain.yaml"
    config.write_text("stages: {../a: {command: 'true'}}\n")
    with pytest.raises(UserError, match="use letters, digits and dashes"):
        change(ChainConfig(), config_file=config).check()


def test_unknown_stages_are_told(diamond, capsys):
    assert main([*diamond, "--stages", "rihgt"]) == 2
    assert "did you mean 'right'" in capsys.readouterr().err


# --- here -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 3])
def test_the_same_chain_runs_here(diamond, ran, at_once, capsys):
    assert main([*diamond, "--local", "--at_once", str(at_once)]) == 0
    assert sorted(ran()) == sorted(["first/0", "left/0", "right.0/3", "right.1/3", "right.2/3", "last/0"])
    assert ran()[0] == "first/0" and ran()[-1] == "last/0"
    capsys.readouterr()
    main(["status", *diamond])
    assert capsys.readouterr().out.count("ended well") == 4


def test_here_too_only_what_failed_runs_again(diamond, ran, tmp_path, capsys):
    for name in ("left", "right.1"):
        (tmp_path / f"{name}.fails").touch()
    assert main([*diamond, "--local"]) == 1
    assert "last: left out, for left failed" in capsys.readouterr().out
    assert {"right.0/3", "right.1/3", "right.2/3"} <= set(ran()) and "last/0" not in ran()
    (tmp_path / "left.fails").unlink()
    (tmp_path / "right.1.fails").unlink()
    before = len(ran())
    assert main([*diamond, "--local", "--failed"]) == 0
    assert ran()[before:] == ["left/0", "right.1/3", "last/0"]


def test_what_runs_at_once_is_as_much_as_asked_for(tmp_path):
    """Each of three tasks ends when all three have begun."""
    all_begun = f"test -e {tmp_path}/0.begun -a -e {tmp_path}/1.begun -a -e {tmp_path}/2.begun"
    command = (
        f"stages.a.command=touch {tmp_path}/$TASK.begun; "
        f"for _ in {{1..2400}}; do {all_begun} && exit 0; sleep .05; done; exit 1"
    )
    assert (
        main([f"folder={tmp_path / 'chain'}", *HERE, command, "stages.a.array=0-2", "--local", "--at_once", "3"]) == 0
    )


def test_tasks_are_told_to_stop_with_the_chain(tmp_path, capsys):
    """SIGTERM: the task under way is told, has time to save, and counts as unfinished."""
    command = f"trap 'touch {tmp_path}/saved; exit 1' TERM; touch {tmp_path}/begun; while :; do sleep .05; done"
    words = [f"folder={tmp_path / 'chain'}", *HERE, f"stages.a.command={command}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "megadit.train.slurm", *words, "--local"], stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=240)
    assert process.returncode == 143 and "--local --failed runs what has not succeeded" in told
    assert (tmp_path / "saved").exists()
    main(["status", *words])
    assert "a: ended without a word" in capsys.readouterr().out


@pytest.mark.slow
def test_a_chain_here_ends_in_a_video(tmp_path, monkeypatch):
    """Clips, two ranks of training, a bundle, a video: commands of every kind."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    dataset, run, bundle = (tmp_path / name for name in ("dataset", "train", "bundle"))
    train = f"-m megadit.train --recipe digits_tiny {' '.join(FEW_STEPS)} train.train_iters=4 validation.interval=0"
    words = [
        f"folder={tmp_path / 'chain'}",
        *HERE,
        f"stages.data.command=megadit prepare digits {dataset} --num_clips 16 --num_images 16 --num_val 4",
        f"stages.train.torchrun={train} data.path={dataset} train.output_dir={run}",
        "stages.train.ranks_per_node=2",
        f"stages.bundle.command=megadit bundle {run} {bundle} --ema none",
        f"stages.video.command=megadit generate --checkpoint_path {bundle} --prompt 'a red seven' --num_steps 2 "
        f"--video_save_path {tmp_path}/seven.mp4",
    ]
    assert main([*words, "--local"]) == 0, _logs(tmp_path / "chain")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 4
    assert json.loads((bundle / "megadit.json").read_text())
    assert (tmp_path / "seven.mp4").stat().st_size > 0


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in (folder / "logs").iterdir())


@pytest.mark.parametrize(("time", "seconds"), [("4:00", 240), ("0:00:00", 0), ("0-0:05:00", 300), ("00:04:59", 299)])
def test_a_training_has_time_left_after_its_notice(time, seconds):
    """Slurm reads 4:00 as four minutes, and 0:00:00 as no limit."""
    overrides = [f"stages.a.time={time}", "stages.a.ranks_per_node=1"]
    with pytest.raises(UserError, match=rf"stages.a.time='{time}' is over after {seconds} s"):
        change(ChainConfig(), overrides=[*overrides, "stages.a.torchrun=-m x"]).check()
    change(ChainConfig(), overrides=[*overrides, "stages.a.command=ls"]).check()
    change(ChainConfig(), overrides=["stages.a.torchrun=-m x", "stages.a.time=1-0:00", "stages.a.notice=86399"]).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "4"], "--nodes belongs to validate"),
        (["--partition", "gpu"], "--partition belongs to validate"),
        (["status", "--nodelist", "a1"], "--nodelist belongs to validate"),
        (["--at_once", "2", "--dry-run"], "--at_once=2 belongs to --local"),
        (["--kubernetes", "--local"], "--kubernetes writes all stages"),
        (["--kubernetes", "--stages", "right"], "--kubernetes writes all stages"),
        (['cluster.environment=["A=\'x"]'], "is not shell"),
        (["folder=~/chain"], "folder=~/chain: no shell has replaced ~"),
    ],
)
def test_what_would_have_no_effect_or_another_is_told(diamond, options, message, capsys):
    assert main([*diamond, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_stage_that_is_named_twice_runs_once(diamond):
    chain = change(ChainConfig(), overrides=diamond)
    assert _chosen(chain, SlurmOptions(stages="first,right,first")) == ["first", "right"]
