"""Ranks on this machine: Megatron, and the shim that patches torch for it, stay out of the process that tests."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Ranks = list[subprocess.Popen]
TIMEOUT = 240


@pytest.fixture(scope="module")
def start_ranks() -> Callable[..., Ranks]:
    """start_ranks(2, "-m", "megadit.train", ...): the same Python command on several ranks; killed after the module."""
    started: Ranks = []

    def start(count: int, *command: str | Path) -> Ranks:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        ranks = [_start_rank(rank, count, port, command) for rank in range(count)]
        started.extend(ranks)
        return ranks

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def run_ranks(start_ranks) -> Callable[..., list[str]]:
    """Like `start_ranks`, but waits: what each rank printed, once all have succeeded."""

    def run(count: int, *command: str | Path) -> list[str]:
        return wait_for(start_ranks(count, *command))

    return run


def wait_for(ranks: Ranks, *, code: int = 0) -> list[str]:
    """What each rank printed (both streams); every exit code must be `code`."""
    outputs = [process.communicate(timeout=TIMEOUT)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [code] * len(ranks), "\n".join(outputs)[-6000:]
    return outputs


def _start_rank(rank: int, count: int, port: int, command: tuple) -> subprocess.Popen:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    environment = {
        **os.environ,
        **{name: str(value) for name, value in place.items()},
        "MASTER_ADDR": "localhost",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
