"""Progress of a chain: recorded states of its tasks, and the queue's state of those without a record."""

import os
import signal
import socket
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megadit.train.slurm.config import ChainConfig

Word = Literal["new", "waiting", "running", "done", "failed", "lost"]
WORDS: dict[Word, str] = {
    "new": "not submitted",
    "waiting": "in the queue",
    "running": "running",
    "done": "ended well",
    "failed": "ended with an error",
    "lost": "ended without a word: killed, or its node died, or it was cancelled as one before it failed",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One job of a stage."""

    stage: str
    number: int | None
    """Index in an array; None for a stage without tasks."""
    word: Word
    code: int | None = None
    """Exit code; None before the end."""
    job: str = ""


def read_tasks(chain: ChainConfig) -> list[Task]:
    """All tasks of the chain, in its order."""
    folder = Path(chain.folder)
    jobs = _submitted(folder)
    waiting = _queued([job for job in jobs.values() if job])
    tasks = []
    for name, stage in chain.stages.items():
        for number in stage.tasks or [None]:
            path = folder / "state" / (name if number is None else f"{name}.{number}")
            tasks.append(_task(name, number, path, jobs.get(name, ""), waiting))
    return tasks


def unfinished(tasks: list[Task]) -> list[str]:
    """Arguments for submit.sh to rerun failed tasks (`train`, `encode:3,17`), except running ones."""
    words = []
    for stage in dict.fromkeys(task.stage for task in tasks):
        of_stage = [task for task in tasks if task.stage == stage]
        bad = [task for task in of_stage if task.word in ("new", "failed", "lost")]
        if bad and bad[0].number is not None and len(bad) < len(of_stage):
            words.append(f"{stage}:{','.join(str(task.number) for task in bad)}")
        elif bad:
            words.append(stage)
    return words


def status(tasks: list[Task]) -> str:
    """A line for each stage."""
    lines = []
    for stage in dict.fromkeys(task.stage for task in tasks):
        of_stage = [task for task in tasks if task.stage == stage]
        if of_stage[0].number is None:
            said = _said(of_stage[0])
        else:
            counts = Counter(task.word for task in of_stage)
            said = ", ".join(f"{counts[word]} {WORDS[word]}" for word in WORDS if counts[word])
            bad = [str(task.number) for task in of_stage if task.word in ("failed", "lost")]
            said += f" (tasks {','.join(bad[:20])}{', ...' if len(bad) > 20 else ''})" if bad else ""
        lines.append(f"{stage}: {said}" + (f" [job {of_stage[0].job}]" if of_stage[0].job else ""))
    return "\n".join(lines)


def said_of(code: int) -> str:
    """Describe an exit code (docs/commands.md)."""
    if 128 < code < 160:
        return f"stopped by {signal.Signals(code - 128).name} ({code})"
    return f"ended with an error ({code})"


def _said(task: Task) -> str:
    return said_of(task.code) if task.word == "failed" else WORDS[task.word]


def _task(stage: str, number: int | None, path: Path, job: str, waiting: set[str]) -> Task:
    words = path.read_text(encoding="utf-8").split() if path.is_file() else []
    match words:
        case [code] if code.isdecimal():
            word = "done" if code == "0" else "failed"
            return Task(stage=stage, number=number, word=word, code=int(code), job=job)
        case ["running", "here", host, process]:
            word = "running" if host != socket.gethostname() or _lives(int(process)) else "lost"
        case ["running", of]:
            word = "running" if of in waiting else "lost"
        case ["waiting", *_]:
            word = "waiting" if job in waiting else "lost"
        case _:
            word = "waiting" if job in waiting else "lost" if job else "new"
    return Task(stage=stage, number=number, word=word, job=job)


def _submitted(folder: Path) -> dict[str, str]:
    """Stage -> id of its last job."""
    path = folder / "jobs"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return dict(line.split()[:2] for line in lines if len(line.split()) >= 2)


def _queued(jobs: list[str]) -> set[str]:
    """Select the jobs that are in Slurm's queue; none without Slurm."""
    if not jobs:
        return set()
    try:  # one call for all: squeue fails where it knows none of the jobs
        listed = subprocess.run(
            ["squeue", "--noheader", "--format=%A %F", f"--jobs={','.join(jobs)}"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return set()
    return set(listed.stdout.split())


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
