"""`megadit serve up`: a Triton server and the gateway in front of it, kept running whatever happens to either.

Each is watched: one that dies is started again, one that answers nothing for a while is killed first, and a Triton
whose Python backend lost a process, which would fail every request from then on, counts as dead.
"""

import signal
import sys
import threading

from megadit.models.shared.command import CommandParser, run_command
from megadit.serve.gateway.process import gateway_process
from megadit.serve.local_server import HANG_SECONDS, LocalServer, Ports
from megadit.serve.supervise import OwnedProcess, keep_running, tell_on_stderr

_SECONDS_TO_ANSWER = 15
"""What a gateway may take to end beyond its drain."""


def main(argv: list[str] | None = None) -> int:
    """Runs both until it is told to stop (Ctrl-C, SIGTERM); returns the exit code."""
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def _run(argv: list[str]) -> int:
    place = argv.index("--") if "--" in argv else len(argv)
    options, of_the_gateway = _parser().parse_args(argv[:place]), argv[place + 1 :]
    ports = Ports(http=options.http_port, grpc=options.grpc_port, metrics=options.triton_metrics_port)
    models = tuple(options.model or ("*",))
    triton = LocalServer(options.repository, ports=ports, models=models, hang_seconds=options.hang_seconds)
    arguments = [f"--server=grpc://{triton.grpc_url}", f"--drain_seconds={options.drain_seconds}", *of_the_gateway]
    gateway = gateway_process(
        arguments + [f"--model={name}" for name in options.model or ()],
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


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="megadit serve up",
        description="A Triton server and the gateway, kept running. What follows `--` goes to `megadit serve gateway`.",
    )
    parser.add_argument("repository", metavar="REPOSITORY", help="written by `megadit serve build-repository`")
    parser.add_argument("--model", action="append", metavar="NAME", help="load this model alone; may be repeated")
    parser.add_argument("--host", default="127.0.0.1", help="of the gateway (default: 127.0.0.1; 0.0.0.0: all)")
    parser.add_argument("--port", type=int, default=8080, metavar="PORT", help="of the gateway (default: 8080)")
    parser.add_argument("--drain_seconds", type=float, default=30.0, metavar="S", help="to finish jobs (default: 30)")
    parser.add_argument(
        "--hang_seconds",
        type=float,
        default=HANG_SECONDS,
        metavar="S",
        help=f"without an answer, until either is killed (default: {HANG_SECONDS:g})",
    )
    parser.add_argument("--http_port", type=int, default=8000, metavar="PORT", help="Triton's (default: 8000)")
    parser.add_argument("--grpc_port", type=int, default=8001, metavar="PORT", help="Triton's (default: 8001)")
    parser.add_argument("--triton_metrics_port", type=int, default=8002, metavar="PORT", help="(default: 8002)")
    return parser
