"""Two torchrun agents, as on two nodes, train one run; what dies is started again and the run goes on exactly."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megadit.models.megatron.checkpoint import find_checkpoints

pytestmark = pytest.mark.slow

STEPS = 60
RUN = (
    *("-m", "megadit.train", "--recipe", "digits_tiny", "--mock", f"train.train_iters={STEPS}"),
    *("validation.interval=0", "checkpoint.save_interval=7", "checkpoint.keep_last=2", "logger.tensorboard=false"),
)


def start_agent(out: Path, port: int, number: int) -> subprocess.Popen:
    log = (out.parent / f"agent{number}.log").open("ab")
    options = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=elastic")
    options += (f"--rdzv-conf=is_host={number == 0}",)  # the first agent holds the store, as the head node does
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, f"--rdzv-endpoint=localhost:{port}"]
        + [*RUN, f"train.output_dir={out}"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, the nearest first."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = list(parents.get(pid, []))
    for child in found:
        found += parents.get(child, [])
    return found


def kill(*pids: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def wait_until(condition, out: Path) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, said(out)[-4000:]
        time.sleep(0.01)


def said(out: Path) -> str:
    """All that both agents and their ranks wrote."""
    return "".join((out.parent / f"agent{number}.log").read_text() for number in range(2))


def newest_checkpoint(out: Path) -> str:
    """Its name, "" before the first: its files follow its step while training goes on."""
    return max((path.name for path in find_checkpoints(out / "checkpoints")), default="")


def losses(out: Path) -> list[tuple]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["consumed_samples"]) for line in lines]


def test_a_killed_rank_and_a_killed_agent_continue_the_run(run_ranks, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_ranks(2, *RUN, f"train.output_dir={whole}")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    agents = [start_agent(cut, port, 0), start_agent(cut, port, 1)]
    try:
        wait_until(lambda: newest_checkpoint(cut), cut)
        kill(*descendants(agents[1].pid))  # its rank: both agents start theirs again
        wait_until(lambda: "continuing from" in said(cut), cut)
        before = newest_checkpoint(cut)
        wait_until(lambda: newest_checkpoint(cut) > before, cut)
        doomed = [agents[1].pid, *descendants(agents[1].pid)]  # the whole node
        kill(*doomed)
        agents[1].wait()
        agents[1] = start_agent(cut, port, 1)
        codes = [agent.wait(timeout=300) for agent in agents]
    finally:
        for agent in agents:
            kill(agent.pid, *descendants(agent.pid))
    assert codes == [0, 0], said(cut)[-6000:]
    assert said(cut).count("continuing from") >= 2
    assert losses(cut) == losses(whole)
