"""The first hour of somebody who comes with clips of their own, played again from README.md and docs/ alone.

Every command is copied out of a page, with its steps and sizes made small, and so is the run's file; every line that is
looked for is one that a page shows, `...` standing for anything.
"""

import json
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megadit.infer.media.video_io import read_video

from .documents import PAGES, ROOT, SHOWN, blocks
from .own_clips import write_own_clips

PAGE = ROOT / "docs" / "own-clips.md"
SMALL = {
    "--nproc 2": "",
    "num_layers: 6 ": "num_layers: 2 ",
    "hidden_size: 192": "hidden_size: 144",
    "seq_length: 1920": "seq_length: 640",
    "train_iters: 1000": "train_iters: 24",
    "interval: 250": "interval: 8",
    "num_steps: 16": "num_steps: 4",
    "train.train_iters=200": "train.train_iters=3",
}
"""What a page says -> what is run: the only changes."""


def small(text: str) -> str:
    for said, run in SMALL.items():
        text = text.replace(said, run)
    return text


def page_command(start: str) -> list[str]:
    """The first command of the pages that begins so and that anybody can run, small."""
    found = [
        command for page in (PAGE, *PAGES) for block in blocks(page) if not block.needs for command in block.commands
    ]
    command = next((command for command in found if command.startswith(start)), None)
    assert command is not None, f"no page has a command that begins {start!r}"
    return shlex.split(small(command))[1:]


def shown_lines() -> list[str]:
    return [line for block in blocks(PAGE) if block.language in SHOWN for line in block.text.splitlines()]


def says(output: str, line: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in line.split("..."))
    return re.search(f"^{pattern}$", output, re.MULTILINE) is not None


def test_a_line_is_found_or_missed():
    assert says("a\nfolder: runs/my_run\n", "folder: runs/my_run") and not says(
        "folder: runs/my_run2", "folder: runs/my_run"
    )
    assert says("left out: 12 x broken", "left out: ... x broken") and not says(
        "left out: 12 x", "left out: ... x broken"
    )
    with pytest.raises(AssertionError, match="no page has a command that begins 'megadit dance'"):
        page_command("megadit dance")


@pytest.fixture
def play(run_ranks) -> Callable[..., str]:
    """play("megadit info", ...): what the page's command says that begins so; or the command itself, as words."""

    def run(start: str | list[str]) -> str:
        words = page_command(start) if isinstance(start, str) else start
        (output,) = run_ranks(1, "-m", "megadit.models.shared.cli.verbs", *words)
        return output

    return run


def stop_by_ctrl_c(start_ranks, wait_for, *, after: str) -> str:
    """What the run of the page says that is interrupted once it has said `after`."""
    ranks = start_ranks(
        1, "-m", "megadit.models.shared.cli.verbs", *page_command("megadit train --config-file my_run.yaml --nproc")
    )
    while after not in ranks[0]._told():
        assert ranks[0].poll() is None, ranks[0]._told()
        time.sleep(0.02)
    ranks[0].send_signal(signal.SIGINT)
    (output,) = wait_for(ranks, code=130)
    return output


@pytest.mark.slow
def test_the_hour_of_a_newcomer(play, start_ranks, wait_for, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    captions = write_own_clips(Path("clips"))
    told = [play("megadit new clips")]
    assert f"{len(captions) + 4} videos" in told[0] and Path("runs/clips/run.yaml").is_file()

    told.append(play("megadit prepare videos clips data/clips"))
    report = json.loads(Path("data/clips/report.json").read_text())
    assert sum(report["samples"].values()) == len(captions) and report["transparent"] == 3
    assert {name: report["skips"][name] for name in ("near-duplicate", "broken", "static")} == {
        "near-duplicate": 2,
        "broken": 1,
        "static": 1,
    }
    play("megadit info data/clips --sheet")
    assert read_video("clips.png")[0].std() > 1

    (file,) = (block for block in blocks(PAGE) if block.file)
    Path(file.file).write_text(small(file.text))
    dry = play("megadit train --config-file my_run.yaml --dry-run")
    assert "parameters: " in dry and "memory of a rank: " in dry and "note: " not in dry
    told.append(stop_by_ctrl_c(start_ranks, wait_for, after="validation at step 8"))
    told.append(play("megadit train --config-file my_run.yaml --nproc"))
    steps = [json.loads(line)["step"] for line in Path("runs/my_run/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 25))
    play("megadit info runs/my_run --html")
    page = Path("runs/my_run.html").read_text()
    assert "data:image/png;base64," in page and page.count("data:video/mp4;base64,") >= 12
    assert "hidden_size: 144" in page

    for line in told[-1].partition("next: ")[2].splitlines():  # what the run itself proposes
        play(shlex.split(line)[1:])
    assert read_video("runs/my_run.mp4")[0].shape == (17, 64, 64, 3)
    play("megadit bundle runs/my_run my_model")
    told.append(play("megadit generate --checkpoint_path my_model"))
    assert len(list(Path("videos").glob("*.mp4"))) == len(list(Path("videos").glob("*.mp4.json"))) == 3
    missing = [line for line in shown_lines() if not says("\n".join(told), line)]
    assert not missing, "\n".join([*missing, "", *told])

    Path("my_clips").mkdir()
    for path in Path("clips").glob("sticker *"):
        shutil.copy(path, "my_clips")
    for start in (
        "prepare videos my_clips data/more",
        "train --config-file my_run.yaml data.path=data/more",
        "bundle runs/more",
    ):
        play(f"megadit {start}")
    again = page_command("megadit generate --checkpoint_path my_model")
    again[again.index("my_model")] = "my_second_model"
    assert "warning: no caption of the training data says 'roof'" in play(again)
    again[again.index("--prompt") + 1] = captions["00.mp4"]
    assert "warning" not in play(again), "it forgot words of the model that it began with"
