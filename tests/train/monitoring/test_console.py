"""A run says what it is, how far it is, what validation found, where its files are, and what comes next."""

import fcntl
import json
import os
import pty
import re
import shlex
import statistics
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from dataclasses import replace

import pytest

from megadit.models.machine import free_memory
from megadit.models.shared.cli import verbs
from megadit.train.checkpoints.checkpoint import RunState
from megadit.train.monitoring.console import beginning, ending
from megadit.train.monitoring.metrics import time_left
from megadit.train.recipes import load_recipe

LINE = re.compile(
    r"^Training iteration \d+/\d+ \| .* \| reduced_train_loss: \d\S* \| .* \| ETA: (?:\d+ (?:h|min|s) ?)+$",
    re.MULTILINE,
)
"""A step in a pipe or a file: where it is, of how many, its loss, the time left."""


@pytest.fixture(scope="module")
def told(run_ranks, tiny_arguments, tmp_path_factory):
    """(folder, lines) of a run of two ranks into a pipe, its validations and checkpoints among its steps."""
    out = tmp_path_factory.mktemp("told") / "run"
    return out, run_ranks(2, *tiny_arguments, f"train.output_dir={out}")


def test_what_a_run_says(told, tiny_dataset):
    out, (first, second) = told
    for line in (
        r"digits_tiny: [\d,]+ parameters, on 2 rank\(s\)",
        rf"data: 32 samples of {tiny_dataset}, about \d+ a step: at most 192 video tokens, in 2 packs of 96",
        r"from the data set: model.in_channels=24 \(recipe: 32\), .*",
        r"memory of a rank: about \S+ [MG]iB, plus Python and torch; \S+ [MG]iB are free",
        rf"folder: {out}",
        r"estimated time: about \S+ s for 4 steps of \S+ s",
        rf"validation at step 2: loss \S+ with .*, the lowest; \S+ with .*; 4 video\(s\) in {out}/samples/step_0000002",
        rf"checkpoint: {out}/checkpoints/iter_0000002",
        rf"checkpoint: {out}/checkpoints/iter_0000004",
        r"done: 4 of 4 steps, 4 of them in the last \d+ s; validation loss \S+",
        rf"look at: `megadit info {out} --html {out}.html`",
        r"seen: \d+ samples, \S+ epochs of the 32 of the training split",
        rf"next: megadit bundle {out} {out}/bundle",
    ):
        assert re.search(f"^{line}$", first, re.MULTILINE), line
    assert len(LINE.findall(first)) == 4
    steps = [json.loads(line)["samples"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert float(re.search(r"about (\d+) a step", first)[1]) == pytest.approx(statistics.mean(steps), rel=0.2)
    assert not any(word in second for word in ("parameters", "validation at", "checkpoint:", "done:", "next:"))


@pytest.mark.slow
def test_the_next_commands_make_a_video(told):
    out, (first, _) = told
    commands = re.findall(r"^(?:next:|     ) megadit (.*)$", first, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert verbs.main([*shlex.split(command)]) == 0
    assert (out.parent / "run.mp4").stat().st_size > 0


def test_a_finished_run_says_so_again(told, run_ranks, tiny_arguments):
    out, _ = told
    first, _ = run_ranks(2, *tiny_arguments, f"train.output_dir={out}")
    assert "done: 4 of 4 steps, 0 of them" in first and "all steps are done" in first


def test_what_depends_on_the_run(tmp_path):
    run = load_recipe("digits")
    run = replace(run, train=replace(run.train, output_dir=str(tmp_path)), data=replace(run.data, mock=True))
    import torch

    from ...half_products import without_half_products

    lines = beginning(run, 2, torch.device("cpu"), 0.5)
    assert "data: random samples, about 120 a step: at most 3,840 video tokens, in 2 packs" in lines[1]
    assert free_memory(torch.device("cpu")) > 0 and len(lines) == 5
    half = replace(run, train=replace(run.train, precision="bf16"))
    with without_half_products():
        assert beginning(run, 2, torch.device("cpu"), 0.5)[-1].startswith("estimated time")
        assert re.search(
            "does not multiply bfloat16.*fp32 avoids that", beginning(half, 2, torch.device("cpu"), 0.5)[-1]
        )
    end = ending(run, RunState(iteration=10**9), steps=1, seconds=2.0, caption=None)
    assert not any("next:" in line for line in end), "nothing encodes prompts of random samples"
    (tmp_path / "curves.png").touch()
    end = ending(run, RunState(iteration=10**9), steps=1, seconds=2.0, caption=None)
    assert f"look at: {tmp_path}/curves.png, " in end[1]


@pytest.mark.parametrize(("seconds", "is_slow"), [(0.9, False), (1.4, False), (1.6, True), (15.0, True)])
def test_steps_that_take_far_longer_than_expected_are_named(seconds, is_slow):
    words = time_left(100, seconds, 1.0)
    assert "for 100 steps more" in words and (f"a step takes {seconds:.2g} s, not 1" in words) == is_slow
    assert "not 1" not in time_left(3, seconds, 1.0), "it is over soon"


def frames_of(recorded):
    """What a terminal was shown, line by line, without its control sequences."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", recorded)
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()]


def shown_on_terminal(*arguments, widths):
    """Columns -> what a run shows on a pseudo-terminal, which is made wider each time that a few steps were seen."""
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "megadit.train", "--recipe", "digits_tiny", "--mock", "validation.interval=0"]
    ours, theirs = pty.openpty()
    left, recorded = list(widths), {}

    def resize():
        recorded[columns := left.pop(0)] = ""
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        return columns

    columns = resize()
    process = subprocess.Popen(
        [*command, *arguments], stdout=theirs, stderr=theirs, env=environment | {"TERM": "xterm"}
    )
    os.close(theirs)
    with suppress(OSError):  # what reading ends with when the run has
        while part := os.read(ours, 1 << 14):
            recorded[columns] += part.decode(errors="replace")
            if left and len(re.findall(r"training \d+/\d+  ETA \d", recorded[columns])) > 4:
                columns = resize()
    process.wait()
    assert process.returncode == 0 and list(recorded) == list(widths), recorded
    return recorded


def steps_seen(shown, columns):
    """The numbers of the steps on a terminal of so many columns, each with total, time left, loss and step time."""
    # the first one may have been drawn before the change of width
    lines = [line for line in frames_of(shown) if re.match(r"training [1-9]\d*/\d+  ETA", line)][1:]
    assert lines and all(len(line) <= columns for line in lines)
    shown_first = r"training (\d+)/\d+  ETA (?:\d+ (?:h|min|s) ?){1,2} loss \d\S*  s/step \S+"
    assert all(re.match(shown_first, line) for line in lines), lines
    return [int(re.match(shown_first, line)[1]) for line in lines]


@pytest.mark.slow
def test_progress_of_two_ranks_on_a_terminal_of_three_widths(tmp_path):
    """`--nproc 2`: the ranks are processes of their own, and the first one alone draws."""
    steps = ("train.train_iters=200", "checkpoint.save_interval=100", f"train.output_dir={tmp_path / 'run'}")
    recorded = shown_on_terminal("--nproc", "2", *steps, widths=(80, 100, 160))
    seen = [step for columns, shown in recorded.items() for step in steps_seen(shown, columns)]
    assert seen == sorted(seen)
    everything = "".join(recorded.values())
    assert everything.count("parameters, on 2 rank(s)") == everything.count("done: 200 of 200 steps") == 1
    assert "checkpoint:" in everything and "estimated time:" in everything
