"""Imports what ranks need, once, and then forks a rank for every command it is sent: milliseconds in place of seconds.

Usage: rank_server.py SOCKET, the number of a connected one (SOCK_SEQPACKET). It sends {"ready"} once all is imported.
Each message {"command", "folder", "environment"}, which brings the file that takes both streams, is answered with
{"pid"}; {"pid", "code"} follows when that rank has ended. A rank is what `python COMMAND` would be, and leaves as one,
but for the interpreter's taking apart of itself; when the tests close the socket, all leave.

Nothing here may start a thread or a process group: neither survives a fork.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import NoReturn

LARGEST_MESSAGE = 200_000
PR_SET_PDEATHSIG = 1
IMPORTED = (
    *(
        "megadit.train.engine.loop",
        "megadit.train.recipes",
        "megadit.train.config.rules",
        "megadit.train.engine.validation",
    ),
    *("megadit.train.monitoring.trackers", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
)


def import_all() -> None:
    from megadit.models.megatron import cpu_shim

    cpu_shim.install()
    for name in IMPORTED:
        importlib.import_module(name)
    measure_speed()
    gc.collect()
    gc.freeze()  # a collection in a rank would write to, and so copy, every page


def measure_speed() -> None:
    """Once for all ranks, which else take a third of a second each for it."""
    import torch

    from megadit.models import machine

    machine.matmul_flops = functools.cache(machine.matmul_flops)
    machine.small_operations_speed = functools.cache(machine.small_operations_speed)
    machine.small_operations_speed()
    for dtype in (torch.float32, torch.bfloat16):
        machine.peak_flops(torch.device("cpu"), dtype)


def serve(channel: socket.socket) -> tuple[dict, int]:
    """Forks until the tests close the channel; returns in every rank: its command, and the file for its output."""
    running: dict[int, int] = {}  # pidfd -> pid
    while True:
        for ready in select.select([channel, *running], [], [])[0]:
            if ready in running:
                pid = running.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                channel.send(json.dumps({"pid": pid, "code": code}).encode())
                continue
            message, files, _, _ = socket.recv_fds(channel, LARGEST_MESSAGE, 1)
            if not message:
                for pid in running.values():
                    os.kill(pid, signal.SIGKILL)
                raise SystemExit
            assert num_threads() == 1
            pid = os.fork()
            if not pid:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives this process
                channel.close()
                for other in running:
                    os.close(other)
                return json.loads(message), files[0]
            os.close(files[0])
            running[os.pidfd_open(pid)] = pid
            channel.send(json.dumps({"pid": pid}).encode())


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def of_a_rank(words: list[str]) -> list[str]:
    """The arguments of Python in a command of `start_with_us`; one rank needs no launcher."""
    _, *words = words
    if "--nproc" in words and words[words.index("--nproc") + 1] == "1":
        del words[words.index("--nproc") : words.index("--nproc") + 2]
    return words


def become(command: list[str], folder: str, environment: dict[str, str], output: int) -> None:
    """Runs the Python command in this process."""
    import numpy
    import torch

    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    numpy.random.seed()  # as in processes that have nothing in common
    torch.set_num_threads(torch.get_num_threads())  # two threads that first use torch's pool after a fork race for it
    is_safe = command[0] == "-P"
    command = command[is_safe:]
    kind, *sys.argv = command if command[0] in ("-m", "-c") else ("script", *command)
    sys.path[0] = str(Path(sys.argv[0]).parent) if kind == "script" else folder
    if is_safe:
        del sys.path[0]
    if kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif kind == "script":
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        program, sys.argv[0] = sys.argv[0], "-c"
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


def become_and_leave(command: list[str], folder: str, environment: dict[str, str], output: int) -> NoReturn:
    """Runs the Python command in this process, and ends it."""
    try:
        become(command, folder, environment, output)
    except SystemExit as end:
        leave(end.code)
    except Exception:
        sys.excepthook(*sys.exc_info())
        leave(1)
    leave(0)


def leave(code: object) -> NoReturn:
    """Ends this process as Python does, but leaves objects alone: to free them writes to every page, half a second."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    import_all()
    channel.send(json.dumps({"ready": True}).encode())
    request, output = serve(channel)
    become_and_leave(**request, output=output)


if __name__ == "__main__":
    main()
