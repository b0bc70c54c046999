"""Trains several runs one after another, on ranks forked from a process that has imported everything.

Usage: python -m golden_parts.ranks FILE, a JSON list of [ranks, arguments of `megadit train`, file for the output].
"""

import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

from golden_parts.commands import environment

IMPORTED = ("train.engine.loop", "train.recipes", "train.__main__")
PR_SET_PDEATHSIG = 1

Run = tuple[int, list[str], str]


def train_all(runs: list[Run], work: Path) -> None:
    """Raises RuntimeError with what the first failing run printed."""
    if not runs:
        return
    file = work / "runs.json"
    file.write_text(json.dumps(runs))
    done = subprocess.run([sys.executable, "-m", "golden_parts.ranks", file], env=environment())
    if done.returncode:
        raise RuntimeError(Path(runs[done.returncode - 1][2]).read_text())


def done_file(output: str | Path) -> Path:
    """Where it stands that the run with this output has ended well."""
    return Path(output).with_suffix(".done")


def train(count: int, arguments: list[str], output: str) -> bool:
    """Whether all ranks ended well."""
    port = free_port()
    pids = []
    for rank in range(count):
        pids.append(os.fork())
        if not pids[-1]:
            become_rank(rank, count, port, arguments, output)
    return not any([os.waitpid(pid, 0)[1] for pid in pids])


def become_rank(rank: int, count: int, port: int, arguments: list[str], output: str) -> None:
    import torch

    leave_with_parent()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    if count > 1:
        os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "localhost"})
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(torch.get_num_threads())  # two threads that first use torch's pool after a fork race for it
    code = 1
    try:
        code = import_module("megadit.train.__main__").main(arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def leave_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def main() -> int:
    """The number of the first run that failed, from 1; 0 if none did."""
    leave_with_parent()
    import_module("megadit.models.megatron.cpu_shim").install()
    for name in IMPORTED:
        import_module(f"megadit.{name}")
    gc.collect()
    gc.freeze()
    for number, run in enumerate(json.loads(Path(sys.argv[1]).read_text()), start=1):
        start = time.monotonic()
        if not train(*run):
            return number
        done_file(run[2]).touch()
        print(f"  {Path(run[2]).stem}: {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
