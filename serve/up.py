"""`megadit serve up`: a Triton server and the gateway in front of it, kept running whatever happens to either.

Each is watched: one that dies is started again, one that answers nothing for a while is killed first, and a Triton
whose Python backend lost a process, which would fail every request from then on, counts as dead.
"""

import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from megadit.models.shared.command import run_command
from megadit.models.shared.options import read_options
from megadit.models.shared.setting import setting
from megadit.serve.gateway.process import gateway_process
from megadit.serve.local_server import HANG_SECONDS, LocalServer, Ports, secret_in
from megadit.serve.supervise import OwnedProcess, keep_running, tell_on_stderr

_SECONDS_TO_ANSWER = 15
"""What a gateway may take to end beyond its drain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpOptions:
    repository: str = setting(help="written by `megadit serve build-repository`", positional=True, metavar="REPOSITORY")
    models: tuple[str, ...] = setting(
        (), "load this model alone; may be repeated", names=("--model",), metavar="NAME", repeated=True
    )
    host: str = setting("127.0.0.1", "of the gateway (default: {default}; 0.0.0.0: all)")
    port: int = setting(8080, "of the gateway (default: {default})", metavar="PORT")
    drain_seconds: float = setting(30.0, "to finish jobs (default: 30)", metavar="S")
    hang_seconds: float = setting(
        HANG_SECONDS, f"without an answer, until either is killed (default: {HANG_SECONDS:g})", metavar="S"
    )
    http_port: int = setting(8000, "Triton's (default: {default})", metavar="PORT")
    grpc_port: int = setting(8001, "Triton's (default: {default})", metavar="PORT")
    triton_metrics_port: int = setting(8002, "(default: {default})", metavar="PORT")
    control_secret: Path | None = setting(None, "as of `megadit serve run`")


def main(argv: list[str] | None = None) -> int:
    """Runs both until it is told to stop (Ctrl-C, SIGTERM); returns the exit code."""
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def _run(argv: list[str]) -> int:
    place = argv.index("--") if "--" in argv else len(argv)
    options = read_options(
        UpOptions,
        argv[:place],
        prog="megadit serve up",
        description="A Triton server and the gateway, kept running. What follows `--` goes to `megadit serve gateway`.",
    )
    of_the_gateway = argv[place + 1 :]
    ports = Ports(http=options.http_port, grpc=options.grpc_port, metrics=options.triton_metrics_port)
    models = options.models or ("*",)
    secret = None if options.control_secret is None else secret_in(options.control_secret)
    triton = LocalServer(
        options.repository, ports=ports, models=models, control_secret=secret, hang_seconds=options.hang_seconds
    )
    arguments = [f"--server=grpc://{triton.grpc_url}", f"--drain_seconds={options.drain_seconds}", *of_the_gateway]
    gateway = gateway_process(
        arguments + [f"--model={name}" for name in options.models],
        host=options.host,
        port=options.port,
        stop_seconds=options.drain_seconds + _SECONDS_TO_ANSWER,
        hang_seconds=options.hang_seconds,
    )
    return supervise([triton.process, gateway])


def supervise(servers: list[OwnedProcess]) -> int:
    """Keeps all running until a signal comes, then ends them, the last first."""
    stopping, failed = threading.Event(), []

    def keep(server: OwnedProcess) -> None:
        try:
            keep_running(server, tell=tell_on_stderr, stopping=stopping)
        except Exception as error:  # rather no service, which is seen, than one that nobody keeps
            failed.append(error)
            stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    threads = [threading.Thread(target=keep, args=[server], name=server.name) for server in servers]
    for thread in threads:
        thread.start()
    while not stopping.wait(1.0):  # with a limit, so that signals are handled
        pass
    for server, thread in reversed(list(zip(servers, threads, strict=True))):
        while thread.is_alive():
            server.stop()
            thread.join(0.1)
    if failed:
        raise failed[0]
    return 0
