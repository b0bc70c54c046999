"""Ranks on this machine: Megatron, and the shim that patches torch for it, stay out of the process that tests.

Ranks are forked from processes that have imported everything (`rank_server.py`): most of the time of a short run is
that of its imports. Those that torchrun or `--nproc` starts (test_elastic.py, test_launch.py, test_seed_commands.py)
import for themselves.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from megadit.models.shared.addresses import free_ports

from .rank_server import of_a_rank

TIMEOUT = 240
RANK_SERVER = Path(__file__).with_name("rank_server.py")


class RankServer:
    """A process that forks ranks."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, RANK_SERVER, str(theirs.fileno())],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._codes: dict[int, int] = {}

    def wait_until_ready(self) -> None:
        assert "ready" in self._receive()

    def start(self, command: list[str], environment: dict[str, str]) -> "Rank":
        output = tempfile.TemporaryFile()
        message = {"command": command, "folder": os.getcwd(), "environment": environment}
        socket.send_fds(self._channel, [json.dumps(message).encode()], [output.fileno()])
        while "code" in (answer := self._receive()):
            self._codes[answer["pid"]] = answer["code"]
        return Rank(self, answer["pid"], output)

    def exit_code(self, pid: int, timeout: float | None) -> int | None:
        """That of a rank; None if it has not ended within so many seconds."""
        deadline = time.monotonic() + (timeout or 0)
        while pid not in self._codes:
            left = None if timeout is None else max(0, deadline - time.monotonic())
            if not select.select([self._channel], [], [], left)[0]:
                return None
            ended = self._receive()
            self._codes[ended["pid"]] = ended["code"]
        return self._codes.pop(pid)

    def _receive(self) -> dict:
        message = self._channel.recv(1_000)
        assert message, f"the process that forks ranks has ended: {self._process.wait()}"
        return json.loads(message)

    def close(self) -> None:
        self._channel.shutdown(socket.SHUT_RDWR)  # processes that were forked meanwhile hold it too
        self._channel.close()
        self._process.wait()


class Rank:
    """A forked process, with what tests use of `subprocess.Popen`."""

    def __init__(self, server: RankServer, pid: int, output: tempfile.TemporaryFile) -> None:
        self.pid, self.returncode = pid, None
        self._server, self._output = server, output

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._wait(timeout) is None:
            raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout, self._told().encode())
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self._told(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid, timeout)
        return self.returncode

    def _told(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")


Ranks = list[Rank | subprocess.Popen]


@pytest.fixture(scope="session")
def rank_servers() -> Iterator[Callable[[int], RankServer | None]]:
    """rank_servers(rank): the process that forks it.

    Two take turns: ranks that share no interpreter do not agree on the order of a set, or an address, by chance. None
    with CUDA, which does not survive a fork.
    """
    import torch

    servers = [] if torch.cuda.is_available() else [RankServer(), RankServer()]
    for server in servers:
        server.wait_until_ready()
    yield lambda rank: servers[rank % 2] if servers else None
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def start_ranks(rank_servers) -> Iterator[Callable[..., Ranks]]:
    """start_ranks(2, "-m", "megadit.train", ...): the same Python command on several ranks; killed after the module.

    One rank alone is not told that it is one. With an `environment` (names beside those of this process) ranks import
    for themselves.
    """
    started: Ranks = []

    def start(count: int, *command: str | Path, environment: dict[str, str] | None = None) -> Ranks:
        (port,) = free_ports(1)
        servers = [rank_servers(rank) if environment is None else None for rank in range(count)]
        ranks = [_start_rank(server, rank, count, port, command, environment) for rank, server in enumerate(servers)]
        started.extend(ranks)
        return ranks

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def run_ranks(start_ranks) -> Callable[..., list[str]]:
    """Like `start_ranks`, but waits: what each rank printed, once all have exited with `code`."""

    def run(count: int, *command: str | Path, code: int = 0, timeout: float = TIMEOUT, **settings) -> list[str]:
        return _wait(start_ranks(count, *command, **settings), code, timeout)

    return run


@pytest.fixture(scope="session")
def forked(rank_servers) -> Callable[[], AbstractContextManager[None]]:
    """with forked(): processes of `run_module` are forked, too, one rank without a launcher; what they print is printed
    once they end."""

    def start(words: list[str]) -> SimpleNamespace:
        process = _start_rank(rank_servers(0), 0, 1, 0, tuple(of_a_rank(words)), None)

        def wait() -> int:
            print(process.communicate()[0], end="", flush=True)
            return process.returncode

        return SimpleNamespace(wait=wait, send_signal=process.send_signal)

    return lambda: mock.patch("megadit.models.shared.cli.command.start_with_us", start)


@pytest.fixture
def forked_modules(forked) -> Iterator[None]:
    """`forked` for a whole test."""
    with forked():
        yield


@pytest.fixture(scope="module")
def wait_for() -> Callable[..., list[str]]:
    """wait_for(ranks, code=0): what each rank printed (both streams); every exit code must be `code`."""
    return _wait


def _wait(ranks: Ranks, code: int = 0, timeout: float = TIMEOUT) -> list[str]:
    outputs = [process.communicate(timeout=timeout)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [code] * len(ranks), "\n".join(outputs)[-6000:]
    return outputs


def _start_rank(
    server: RankServer | None, rank: int, count: int, port: int, command: tuple, more: dict[str, str] | None
) -> Rank | subprocess.Popen:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(more or {})}
    if count > 1:
        environment |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "localhost"}
    words = list(map(str, command))
    if server is not None:
        return server.start(words, environment)
    return subprocess.Popen(
        [sys.executable, *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
