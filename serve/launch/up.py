"""`megadit serve up`: runs and supervises a Triton server and the gateway in front of it.

Both are watched: a process that dies is restarted, one that hangs is killed first, and a Triton whose Python backend
lost a process, which would fail all further requests, counts as dead.

To renew (`serve up --drain`, SIGUSR1), the gateway starts no new jobs, running ones finish, Triton is restarted with
the current contents of its repository, and the gateway continues. Jobs are accepted all the time.
"""

import fcntl
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megadit.models.shared.addresses import check_free
from megadit.models.shared.cli.command import ending_signals, entry_point, python_module
from megadit.models.shared.cli.options import read_options
from megadit.models.shared.cli.setting import port_setting, setting
from megadit.models.shared.errors import UserError
from megadit.models.shared.files import cache_folder
from megadit.models.shared.folder_lock import process_stat
from megadit.models.shared.resources import ANYWAY_HELP
from megadit.serve.launch.local_server import (
    HANG_SECONDS,
    OTHERS_HELP,
    LocalServer,
    Ports,
    check_memory,
    control_secret,
)
from megadit.serve.supervise import Ailment, OwnedProcess, keep_running, print_on_stderr, reachable, responds

_START_SECONDS = 300
_SECONDS_TO_ANSWER = 15
"""Seconds that a gateway may take to end in addition to its drain."""
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_FOR_ORPHANS = 60.0
_GATEWAY = {"megadit.models.shared.cli.verbs", "serve", "gateway"}
"""Words in the command line of a gateway that `serve up` started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpOptions:
    repository: str = setting(
        help="model repository of `megadit serve build-repository`", positional=True, metavar="REPOSITORY"
    )
    models: tuple[str, ...] = setting(
        (), "load only this model; may be repeated", names=("--model",), metavar="NAME", repeated=True
    )
    host: str = setting("127.0.0.1", "address of the gateway (default: {default}; 0.0.0.0: all)")
    port: int = port_setting(8080, "port of the gateway (default: {default})")
    drain_seconds: float = setting(30.0, "seconds for running jobs to finish at the end (default: 30)", metavar="S")
    hang_seconds: float = setting(
        HANG_SECONDS,
        f"seconds without a response until Triton or the gateway is killed (default: {HANG_SECONDS:g})",
        metavar="S",
    )
    http_port: int | None = port_setting(None, "HTTP port of Triton (default: none, a socket for this user only)")
    grpc_port: int | None = port_setting(None, "gRPC port of Triton (default: none)")
    triton_metrics_port: int = port_setting(8002, "port of Triton's metrics (default: {default})")
    control_secret: Path | None = setting(None, "file with the secret to replace models, as in `megadit serve run`")
    even_if_others_see_it: bool = setting(False, OTHERS_HELP)
    even_if_too_large: bool = setting(False, ANYWAY_HELP)
    drain: bool = setting(
        False, "let the running `serve up` of this port finish its jobs and reload its repository; wait for it"
    )


@partial(entry_point, is_run=True)
def main(argv: list[str]) -> int:
    """Runs both until a signal to end; returns the exit code."""
    place = argv.index("--") if "--" in argv else len(argv)
    options = read_options(
        UpOptions,
        argv[:place],
        prog="megadit serve up",
        description="Runs a Triton server and the gateway. Options after `--` go to `megadit serve gateway`.",
    )
    if options.drain:
        return ask_to_renew(options.port)
    of_the_gateway = argv[place + 1 :]
    asked = {"http": options.http_port, "grpc": options.grpc_port, "metrics": options.triton_metrics_port}
    ports = Ports(**{name: port for name, port in asked.items() if port is not None})
    is_private = options.http_port is options.grpc_port is options.control_secret is None
    _wait_for_orphans({options.port, ports.http, ports.grpc, ports.metrics})
    models = options.models or ("*",)
    if not options.even_if_too_large:
        check_memory(options.repository, models)
    triton = LocalServer(
        options.repository,
        ports=ports,
        models=models,
        control_secret=control_secret(options.control_secret, even_if_others_see_it=options.even_if_others_see_it),
        is_private=is_private,
        log=_log_of(options.port),
        hang_seconds=options.hang_seconds,
    )
    url = triton.grpc_url if is_private else f"grpc://{triton.grpc_url}"
    arguments = [f"--server={url}", f"--drain_seconds={options.drain_seconds}", *of_the_gateway]
    gateway = gateway_process(
        arguments + [f"--model={name}" for name in options.models],
        host=options.host,
        port=options.port,
        stop_seconds=options.drain_seconds + _SECONDS_TO_ANSWER,
        hang_seconds=options.hang_seconds,
    )
    idle = f"http://{reachable(options.host)}:{options.port}/health/idle"
    with noted(options.port) as note:

        def renew(stopping: threading.Event) -> None:
            _renew(triton.process, gateway, idle, stopping)
            note()

        return supervise([triton.process, gateway], renew)


def _wait_for_orphans(ports: set[int]) -> None:
    """Waits while servers of a killed `serve up` still hold these ports; they are ending."""
    deadline, has_reported = time.monotonic() + _SECONDS_FOR_ORPHANS, False
    while (found := _orphans(ports)) and time.monotonic() < deadline:
        if not has_reported:
            has_reported = True
            print_on_stderr("servers of an earlier `serve up` are still ending; waiting for them")
        for pid in found:
            _wait_for_end(pid, deadline - time.monotonic())


def _wait_for_end(pid: int, seconds: float) -> None:
    """Waits until a process is gone: one that is ending has no command line any more, but still its ports."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            select.select([descriptor], [], [], max(0.0, seconds))
        finally:
            os.close(descriptor)


def _orphans(ports: set[int]) -> list[int]:
    """Processes that hold one of these ports for a `serve up` that has ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):  # processes that end meanwhile
            words = _words(folder)
            is_server = "tritonserver" in {Path(word).name for word in words} or _GATEWAY <= set(words)
            if is_server and any(word.endswith(f"port={port}") for word in words for port in ports):
                _, parent, *_ = process_stat(int(folder.name))
                if "serve" not in _words(Path("/proc", parent)):
                    found.append(int(folder.name))
    return found


def _words(folder: Path) -> list[str]:
    """The command line of a process."""
    return (folder / "cmdline").read_text(encoding="utf-8", errors="replace").split("\0")


def _log_of(port: int) -> Path | None:
    """A log file for Triton's output if stderr is a terminal; None: stderr, for log collectors."""
    if not sys.stderr.isatty():
        return None
    cache_folder().mkdir(parents=True, exist_ok=True)
    log = cache_folder() / f"triton-{port}.log"
    print_on_stderr(f"tritonserver is loading the models; its log: {log}")
    return log


def _renew(triton: OwnedProcess, gateway: OwnedProcess, idle: str, stopping: threading.Event) -> None:
    """Restarts Triton with its current repository while it has no job.

    A Triton that is starting is waited for: ended now, it would count as one that cannot start.
    """
    _wait_for(triton, stopping)
    print_on_stderr("restarting tritonserver: the gateway starts no new jobs, and waits for running ones")
    while not (responds(idle) or stopping.wait(_SECONDS_BETWEEN_LOOKS)):
        if gateway.is_ready():  # a gateway that has just been started is not paused
            gateway.signal(signal.SIGUSR1)
    if not stopping.is_set():
        triton.stop()
        gateway.signal(signal.SIGUSR2)  # starts jobs again when Triton is ready
    _wait_for(triton, stopping)


def _wait_for(server: OwnedProcess, stopping: threading.Event) -> None:
    while not (server.is_alive() and server.is_ready() or stopping.wait(_SECONDS_BETWEEN_LOOKS)):
        pass


def supervise(servers: list[OwnedProcess], renew: Callable[[threading.Event], None] = lambda _: None) -> int:
    """Keeps all servers running until a signal, then ends them, the last first; calls `renew` at SIGUSR1."""
    stopping, renewing, failed = threading.Event(), threading.Event(), []
    signal.signal(signal.SIGUSR1, lambda *_: renewing.set())

    def keep(server: OwnedProcess) -> None:
        try:
            keep_running(server, report=print_on_stderr, stopping=stopping)
        except Exception as error:  # a visible end is better than an unsupervised service
            failed.append(error)
            stopping.set()

    for number in ending_signals():
        signal.signal(number, lambda *_: stopping.set())
    threads = [threading.Thread(target=keep, args=[server], name=server.name) for server in servers]
    for thread in threads:
        thread.start()
    while not stopping.wait(_SECONDS_BETWEEN_LOOKS):  # with a limit, so that signals are handled
        if renewing.is_set():
            renewing.clear()
            renew(stopping)
    for server, thread in reversed(list(zip(servers, threads, strict=True))):
        while thread.is_alive():
            server.stop()
            thread.join(0.1)
    if failed:
        raise failed[0]
    return 0


# ------------------------------------------------------------------------------------------------------ --drain


@contextmanager
def noted(port: int) -> Iterator[Callable[[], None]]:
    """Records within the block, in a locked file, that this process serves at `port`; yields a function that counts a
    renewal. Has no effect if another process (in another container) locks the file, or it cannot be created."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(_note(port))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            print_on_stderr(f"`serve up --drain` will not find this service: {error.strerror} ({cache_folder()})")
            yield lambda: None
            return
        count = 0

        def write() -> None:
            os.pwrite(file, f"{os.getpid()} {count:>9}\n".encode(), 0)

        def renewed() -> None:
            nonlocal count
            count += 1
            write()

        os.ftruncate(file, 0)
        write()
        yield renewed


def ask_to_renew(port: int) -> int:
    """Makes the `serve up` at `port` renew, and waits for it; returns the exit code. Raises UserError if there is none,
    or it ends meanwhile."""
    with _note(port) as file:
        before = _read_note(file, port)
        try:
            os.kill(before[0], signal.SIGUSR1)
        except (ProcessLookupError, PermissionError):
            raise UserError(f"the `serve up` at port {port} is not in this container, or not yours") from None
        while _read_note(file, port) == before:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    print_on_stderr(f"the `serve up` at port {port} has reloaded its repository")
    return 0


@contextmanager
def _note(port: int) -> Iterator[int]:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / f"up-{port}", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _read_note(file: int, port: int) -> tuple[int, int]:
    """(process id, number of renewals)"""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        if written := os.pread(file, 100, 0).split():  # else one is starting
            return int(written[0]), int(written[1])
    raise UserError(f"no `serve up` of yours runs at port {port} here; --port names another")


def gateway_process(
    arguments: Sequence[str], *, host: str, port: int, log: Path | None = None, stop_seconds: float, hang_seconds: float
) -> OwnedProcess:
    """One `megadit serve gateway`; `arguments` are its options, without address and port."""
    url = f"http://{reachable(host)}:{port}"
    hangs = Ailment(reason="it answers nothing", patience=hang_seconds)
    command = python_module("megadit.models.shared.cli.verbs", "serve", "gateway", *arguments)

    def is_alive() -> bool:
        return responds(f"{url}/health/live")

    return OwnedProcess(
        command=[*command, f"--host={host}", f"--port={port}"],
        name="gateway",
        addresses=url,
        ready="answers, and makes videos once tritonserver is ready",
        is_ready=is_alive,
        ailment=lambda: None if is_alive() else hangs,
        start_seconds=_START_SECONDS,
        stop_seconds=stop_seconds,
        log=log,
        prepare=partial(check_free, host, port, "--port"),  # else whoever has it would pass for this gateway
    )
