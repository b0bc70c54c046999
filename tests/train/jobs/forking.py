"""Runs a command whose own processes are forked: before it begins, as nothing forks where threads are.

Usage: forking.py MODULE ARGUMENTS...
"""

import json
import os
import runpy
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

from rank_server import become_and_leave, leave, of_a_rank  # noqa: E402

from megadit.models.shared.cli.command import WITH_PARENT  # noqa: E402

NUM_PROCESSES = 8


def fork_one() -> tuple[int, int]:
    """(pid, where it reads its command) of a process that waits; it ends when nobody can write there any more."""
    read, write = os.pipe()
    if pid := os.fork():
        os.close(read)
        return pid, write
    os.close(write)
    with open(read) as asked:
        words = asked.readline()
    if not words:
        leave(0)
    become_and_leave(json.loads(words), os.getcwd(), {**os.environ, WITH_PARENT: str(os.getppid())}, os.dup(1))


def start(waiting: list[tuple[int, int]], words: list[str]) -> SimpleNamespace:
    """In place of `start_with_us`."""
    pid, write = waiting.pop()
    os.write(write, f"{json.dumps(of_a_rank(words))}\n".encode())
    return SimpleNamespace(
        wait=lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), send_signal=partial(os.kill, pid)
    )


if __name__ == "__main__":
    _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    processes = [fork_one() for _ in range(NUM_PROCESSES)]
    with mock.patch("megadit.models.shared.cli.command.start_with_us", partial(start, processes)):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
