"""Runs a chain on this machine, without Slurm: the stages as processes in the same order, some concurrently."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megadit.models.shared.cli.command import ending_signals_to, exit_code
from megadit.models.shared.errors import StoppedError
from megadit.models.shared.files import atomic_path
from megadit.models.shared.folder_lock import FolderLock
from megadit.train.slurm.config import ChainConfig
from megadit.train.slurm.scripts import local_script
from megadit.train.slurm.state import said_of

POLL_SECONDS = 0.1
PATIENCE_SECONDS = 60
"""Time limit for tasks asked to stop, which may be writing a checkpoint."""


def run_here(chain: ChainConfig, words: list[str], *, at_once: int) -> int:
    """Run the stages (`encode`), or tasks of one (`encode:3,17`), in `words`, `at_once` processes at a time.

    A stage starts when those that it waits for have succeeded; if one fails, stages that need it are left out, and the
    others go on. Output goes to the folder's logs/.

    Returns:
        The exit code of the first process that failed, or 0.
    """
    left = {stage: _tasks(chain, stage, numbers) for stage, _, numbers in (word.partition(":") for word in words)}
    chosen, failed, codes = set(left), set[str](), []
    running: dict[subprocess.Popen, tuple[str, str]] = {}
    with FolderLock(chain.folder, "runs a chain"), _stops_on_signal():
        try:
            while left or running:
                for process in [process for process in running if process.poll() is not None]:
                    stage, task = running.pop(process)
                    code = exit_code(process.returncode)
                    _note(chain, task, str(code))
                    if code:
                        print(f"{task}: {said_of(code)}; see {_log(chain, task)}", flush=True)
                        codes.append(code)
                        failed.add(stage)
                for stage in list(left):
                    busy = {each for each, _ in running.values()}
                    needed = chosen & set(chain.before(stage))
                    if needed & failed:
                        print(f"{stage}: left out, for {min(needed & failed)} failed", flush=True)
                        failed.add(stage)
                        del left[stage]
                        continue
                    if needed & (busy | set(left)):
                        continue
                    while left[stage] and len(running) < at_once:
                        number = left[stage].pop(0)
                        task = stage if number is None else f"{stage}.{number}"
                        running[_start(chain, stage, number, task)] = (stage, task)
                    if not left[stage]:
                        del left[stage]
                time.sleep(POLL_SECONDS)
        finally:
            _stop(running)
    return codes[0] if codes else 0


def _tasks(chain: ChainConfig, stage: str, numbers: str) -> list[int | None]:
    if numbers:
        return [int(number) for number in numbers.split(",")]
    return list(chain.stages[stage].tasks or [None])


def _start(chain: ChainConfig, stage: str, number: int | None, task: str) -> subprocess.Popen:
    numbers = {"TASK": "" if number is None else str(number), "TASKS": str(len(chain.stages[stage].tasks or ()))}
    print(f"{task}: starts; {_log(chain, task)}", flush=True)
    _log(chain, task).parent.mkdir(parents=True, exist_ok=True)
    with open(_log(chain, task), "ab") as log:
        process = subprocess.Popen(
            ["bash", "-c", local_script(chain, stage)],
            env=os.environ | numbers,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a process group, so that it can be stopped with all its children
        )
    _note(chain, task, f"running here {socket.gethostname()} {process.pid}")
    return process


def _log(chain: ChainConfig, task: str) -> Path:
    return Path(chain.folder) / "logs" / f"{chain.name}-{task}.log"


def _note(chain: ChainConfig, task: str, text: str) -> None:
    with atomic_path(Path(chain.folder) / "state" / task) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


@contextmanager
def _stops_on_signal() -> Iterator[None]:
    """Within the block a termination signal stops the tasks, and then ends this process with 128 + signal."""

    def stop(number: int, frame: object) -> None:
        print("stopped by a signal; --local --failed runs what has not succeeded", file=sys.stderr, flush=True)
        raise StoppedError(number)

    with ending_signals_to(stop):
        yield


def _stop(running: dict[subprocess.Popen, tuple[str, str]]) -> None:
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    for process in running:
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
