"""`megadit serve gateway` and `megadit serve keys`: the video API in front of Triton servers, and who may use it."""

import signal
import socket
import sys
import threading
from dataclasses import asdict, fields

import uvicorn
from prometheus_client import start_http_server

from megadit.models.shared.command import CommandParser, run_command
from megadit.models.shared.errors import UserError
from megadit.serve.contract import MODEL
from megadit.serve.gateway.app import create_app
from megadit.serve.gateway.database import Database
from megadit.serve.gateway.keys import KeyLimits, KeyRing
from megadit.serve.gateway.logs import log, log_as_json
from megadit.serve.gateway.runner import RunnerSettings
from megadit.serve.gateway.service import Gateway, GatewaySettings

_SECONDS_UNTIL_GONE = 120.0
"""How long a client may acknowledge or take nothing of what was sent to it."""
_SECONDS_TO_ANSWER = 5
"""How long requests that are being answered may take once the runs are drained."""


def main(argv: list[str] | None = None) -> int:
    """Serves until it is told to stop (Ctrl-C, SIGTERM), and drains; a second signal ends it at once."""
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def _run(argv: list[str]) -> int:
    options = vars(_parser().parse_args(argv))
    given = {name: value for name, value in options.items() if value is not None}
    runner = RunnerSettings(**{each.name: given[each.name] for each in fields(RunnerSettings) if each.name in given})
    names = [each.name for each in fields(GatewaySettings) if each.name in given]
    settings = GatewaySettings(**{name: _tuple(given[name]) for name in names}, runner=runner)
    listening = _listen(options["host"], options["port"])
    gateway = Gateway(settings, port=options["port"])
    log_as_json()
    if options["metrics_port"]:
        start_http_server(options["metrics_port"], addr=options["metrics_host"], registry=gateway.metrics.registry)
    gateway.start()
    log("gateway started", name=gateway.store.owner, port=options["port"], servers=settings.servers)
    return serve(gateway, listening, drain_seconds=options["drain_seconds"])


def serve(gateway: Gateway, listening: socket.socket, *, drain_seconds: float) -> int:
    """Answers until a signal, drains while it still answers, and returns the exit code."""
    config = uvicorn.Config(
        create_app(gateway),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=_SECONDS_TO_ANSWER,
    )
    server = uvicorn.Server(config)
    web = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="web", daemon=True)
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _interrupt() if told.is_set() else told.set())
    web.start()
    while not told.wait(0.5):
        if not web.is_alive():
            log("the web server ended by itself")
            return 1
    log("gateway drains")
    gateway.stop(drain_seconds)
    server.should_exit = True
    web.join()
    log("gateway ended")
    return 0


def _interrupt() -> None:
    raise KeyboardInterrupt


def _listen(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # inherited by connections: a client that is gone without a word would hold its streams for a quarter of an hour
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(_SECONDS_UNTIL_GONE * 1000))
    try:
        listening.bind((host, port))
    except OSError as error:
        raise UserError(f"{host}:{port} cannot be used: {error.strerror}") from error
    return listening


def _tuple(value):
    return tuple(value) if isinstance(value, list) else value


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="megadit serve gateway",
        description="The video API (/v1/videos) in front of one or several Triton servers.",
    )
    parser.add_argument(
        "--server",
        dest="servers",
        action="append",
        metavar="URL",
        help="a Triton server, grpc://HOST:PORT; may be repeated (default: grpc://127.0.0.1:8001)",
    )
    parser.add_argument(
        "--model", dest="models", action="append", metavar="NAME", help=f"may be repeated (default: {MODEL})"
    )
    _add_store(parser)
    parser.add_argument("--results", metavar="URL", help="folder or fsspec URL of videos (default: gateway/videos)")
    parser.add_argument("--result_seconds", type=float, metavar="S", help="how long a video is kept (default: a day)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1; 0.0.0.0: all)")
    parser.add_argument("--port", type=int, default=8080, metavar="PORT", help="(default: 8080)")
    parser.add_argument("--metrics_host", default="127.0.0.1", metavar="HOST", help="(default: 127.0.0.1)")
    parser.add_argument("--metrics_port", type=int, default=9090, metavar="PORT", help="0 is none (default: 9090)")
    parser.add_argument("--name", help="of this gateway, its own at this store (default: HOST:PORT)")
    parser.add_argument("--slots", type=int, metavar="N", help="jobs given to each server at once (default: 8)")
    parser.add_argument("--job_seconds", type=float, metavar="S", help="of one job at Triton (default: 3600)")
    parser.add_argument("--hang_seconds", type=float, metavar="S", help="until a silent server loses its jobs (10)")
    parser.add_argument("--max_body_bytes", type=int, metavar="N", help="of a request (default: 1 MiB)")
    parser.add_argument("--max_streams", type=int, metavar="N", help="progress streams of a key (default: 32)")
    parser.add_argument("--min_free_bytes", type=int, metavar="N", help="room to be left on disks (default: 256 MiB)")
    parser.add_argument("--history_seconds", type=float, metavar="S", help="until a job is forgotten (30 days)")
    parser.add_argument("--drain_seconds", type=float, default=30.0, metavar="S", help="to finish jobs (default: 30)")
    return parser


def _add_store(parser: CommandParser) -> None:
    parser.add_argument(
        "--store",
        metavar="PATH",
        help=f"file or database URL of jobs and keys (default: {GatewaySettings().store})",
    )


# ------------------------------------------------------------------------------------------------------ keys


def keys(argv: list[str] | None = None) -> int:
    """Adds, lists and revokes keys; returns the exit code."""
    return run_command(_run_keys, sys.argv[1:] if argv is None else argv)


def _run_keys(argv: list[str]) -> None:
    options = _keys_parser().parse_args(argv)
    ring = KeyRing(Database(options.store or GatewaySettings().store))
    if options.action == "list":
        for key in ring.all():
            state = "revoked" if key.is_revoked else ", ".join(f"{n} {v}" for n, v in asdict(key.limits).items())
            print(f"{key.id}  {key.name}  {state}" + (f"  {key.webhook_url}" if key.webhook_url else ""))
        return
    if options.subject is None:
        raise UserError(f"`megadit serve keys {options.action}` needs the key's {_SUBJECTS[options.action]}")
    if options.action == "revoke":
        ring.revoke(options.subject)
        print(f"{options.subject} is revoked")
        return
    limits = {each.name: getattr(options, each.name) for each in fields(KeyLimits)}
    limits = KeyLimits(**{name: value for name, value in limits.items() if value is not None})
    text, key = ring.add(options.subject, limits=limits, webhook_url=options.webhook)
    print(f"{key.id} is written down; the key itself is shown this once:", file=sys.stderr)
    print(text)
    if key.webhook_secret:
        print(f"webhooks are signed with {key.webhook_secret}", file=sys.stderr)


_SUBJECTS = {"add": "name", "revoke": "id"}


def _keys_parser() -> CommandParser:
    parser = CommandParser(prog="megadit serve keys", description="Keys of the gateway; they are kept as hashes.")
    parser.add_argument("action", choices=("add", "list", "revoke"))
    parser.add_argument("subject", nargs="?", metavar="NAME|ID", help="a name for `add`, the id for `revoke`")
    _add_store(parser)
    parser.add_argument("--requests_per_minute", type=int, metavar="N", help="(default: 600)")
    parser.add_argument("--max_active", type=int, metavar="N", help="videos waiting or running (default: 64)")
    parser.add_argument("--videos_per_day", type=int, metavar="N", help="(default: 10000)")
    parser.add_argument("--webhook", metavar="URL", help="told when a video of this key is completed or has failed")
    return parser
