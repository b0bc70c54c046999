"""`megadit serve gateway`, `keys` and `webhooks`: the video API in front of Triton servers, its keys, lost webhooks."""

import functools
import os
import signal
import socket
import sys
import threading
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import uvicorn

from megadit.models.shared.addresses import port_error
from megadit.models.shared.cli.command import ending_signals
from megadit.models.shared.cli.options import command
from megadit.models.shared.cli.setting import group, port_setting, setting
from megadit.models.shared.errors import UserError
from megadit.serve.gateway.http.app import create_app
from megadit.serve.gateway.http.connections import BACKLOG, Connection, Door, most_connections
from megadit.serve.gateway.jobs.webhooks import send
from megadit.serve.gateway.logs import log, log_as_json
from megadit.serve.gateway.metrics import serve_metrics
from megadit.serve.gateway.service import Gateway, GatewaySettings
from megadit.serve.gateway.store.database import Database, is_there, one_line_errors
from megadit.serve.gateway.store.keys import KeyLimits, KeyRing
from megadit.serve.gateway.store.store import JobStore

_SECONDS_UNTIL_GONE = 120.0
"""Timeout of a client that acknowledges or reads no data."""
_SECONDS_TO_ANSWER = 5
"""Seconds for running requests after the jobs are drained."""
_INTERRUPTED = 130
"""Exit code after a second signal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayOptions:
    gateway: GatewaySettings = group(GatewaySettings)
    host: str = setting("127.0.0.1", "address to listen on (default: {default}; 0.0.0.0: all)")
    port: int = port_setting(8080, "port to listen on (default: {default})")
    metrics_host: str = setting("127.0.0.1", "address of the metrics (default: {default})", metavar="HOST")
    metrics_port: int = port_setting(9090, "port of the metrics; 0 is none (default: {default})")
    max_connections: int = setting(1024, "client connections at once (default: {default})", low=1, metavar="N")
    """The process's limit of open files may allow fewer."""
    drain_seconds: float = setting(30.0, "seconds for running jobs to finish at the end (default: 30)", metavar="S")


GROUPS: dict[str, tuple[str, ...]] = {
    "most used": ("servers", "models", "host", "port", "store", "results", "adapters", "cors_origins"),
    "limits": (
        *("slots", "max_body_bytes", "max_upload_bytes", "max_uploads", "max_streams", "max_connections"),
        *("min_free_bytes", "private_webhooks"),
    ),
    "times": ("job_seconds", "hang_seconds", "drain_seconds", "result_seconds", "history_seconds"),
    "metrics": ("metrics_host", "metrics_port", "name"),
    "signatures (C2PA) in pictures of videos (Triton signs the videos)": ("c2pa_certificate", "c2pa_key"),
}
EXAMPLES = (
    "megadit serve gateway --server grpc://gpu1:8001 --server grpc://gpu2:8001 --host 0.0.0.0",
    "megadit serve gateway --store postgresql+psycopg://gateway@db/gateway --results s3://BUCKET/videos",
)


@command(
    GatewayOptions,
    is_run=True,
    groups=GROUPS,
    examples=EXAMPLES,
    prog="megadit serve gateway",
    description="The video API (/v1/videos) in front of one or several Triton servers.",
)
def main(options: GatewayOptions) -> int:
    """Serves until a signal to end, then drains; a second signal ends it at once."""
    slots = options.gateway.slots * len(options.gateway.servers)
    door = Door(most_connections(options.max_connections, slots=slots))
    listening = _listen(options.host, options.port)
    with one_line_errors(options.gateway.store):
        gateway = Gateway(options.gateway, port=options.port)
        log_as_json()
        if options.metrics_port:
            serve_metrics(gateway.metrics, options.metrics_host, options.metrics_port)
        gateway.start()
    log("gateway started", name=gateway.store.owner, port=options.port, servers=options.gateway.servers)
    return serve(gateway, listening, door, drain_seconds=options.drain_seconds)


def serve(gateway: Gateway, listening: socket.socket, door: Door, *, drain_seconds: float) -> int:
    """Serves until a signal, drains while it still responds, and returns the exit code."""
    config = uvicorn.Config(
        create_app(gateway),
        http=functools.partial(Connection, door=door),
        ws="none",
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=_SECONDS_TO_ANSWER,
    )
    server = uvicorn.Server(config)
    web = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="web", daemon=True)
    notified = threading.Event()

    def end(number: int, _: Any) -> None:
        if notified.is_set() and number != signal.SIGHUP:  # a closed terminal sends that several times
            _end_at_once()
        notified.set()

    for number in ending_signals():
        signal.signal(number, end)
    signal.signal(signal.SIGUSR1, lambda *_: gateway.runner.pause())
    signal.signal(signal.SIGUSR2, lambda *_: gateway.runner.resume())
    web.start()
    was_paused = False
    while not notified.wait(0.5):
        if not web.is_alive():
            log("the web server ended by itself")
            return 1
        if was_paused != gateway.runner.is_paused:
            was_paused = not was_paused
            log("paused" if was_paused else "resumed")
    log("gateway drains")
    gateway.stop(drain_seconds)
    server.should_exit = True
    web.join()
    log("gateway ended")
    return 0


def _end_at_once() -> None:
    """An exception would wait for the threads of jobs, and of a store that does not respond."""
    os._exit(_INTERRUPTED)


def _listen(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # inherited by connections: streams of a client that vanished would stay for a quarter of an hour
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(_SECONDS_UNTIL_GONE * 1000))
    try:
        listening.bind((host, port))
    except OSError as error:
        raise port_error(host, port, "--port", error) from error
    return listening


# ------------------------------------------------------------------------------------------------------ keys


@dataclass(frozen=True, kw_only=True, slots=True)
class KeysOptions:
    action: Literal["add", "list", "revoke"] = setting(positional=True)
    subject: str | None = setting(None, "a name for `add`, the id for `revoke`", positional=True, metavar="NAME|ID")
    gateway: GatewaySettings = group(GatewaySettings, only=("store",))
    limits: KeyLimits = group(KeyLimits)
    webhook: str | None = setting(
        None, "address to notify when a video of this key is completed or has failed", metavar="URL"
    )


@command(KeysOptions, prog="megadit serve keys", description="Adds, lists and revokes keys of the gateway.")
def keys(options: KeysOptions) -> None:
    """Adds, lists and revokes keys; returns the exit code."""
    place = options.gateway.store
    is_new = not is_there(place)
    if is_new and options.action != "add":
        raise UserError(f"there is no store at {Path(place).absolute()}; {_STORE}")
    with one_line_errors(place):
        _change_keys(options, KeyRing(Database(place)), is_new=is_new)


def _change_keys(options: KeysOptions, ring: KeyRing, *, is_new: bool) -> None:
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
    text, key = ring.add(options.subject, limits=options.limits, webhook_url=options.webhook)
    place = options.gateway.store if "://" in options.gateway.store else Path(options.gateway.store).absolute()
    print(f"{key.id} is stored in {place}; the key itself is printed only now:", file=sys.stderr)
    if is_new:
        print(f"note: this store is new, and a gateway that runs already has another: {_STORE}", file=sys.stderr)
    print(text)
    if key.webhook_secret:
        print(f"webhooks are signed with {key.webhook_secret}", file=sys.stderr)


_STORE = (
    "`serve up` and `serve gateway` take keys of their own --store alone, by default that of the folder they run in"
)
_SUBJECTS = {"add": "name", "revoke": "id"}


# -------------------------------------------------------------------------------------------------- webhooks


@dataclass(frozen=True, kw_only=True, slots=True)
class WebhookOptions:
    action: Literal["list", "resend"] = setting(positional=True)
    video: str | None = setting(
        None, "id for `resend`; without it, all that failed for good", positional=True, metavar="VIDEO"
    )
    gateway: GatewaySettings = group(GatewaySettings, only=("store", "private_webhooks"))


@command(
    WebhookOptions,
    prog="megadit serve webhooks",
    description="Webhooks of finished and failed videos that were not delivered.",
)
def webhooks(options: WebhookOptions) -> int:
    """Lists or sends webhooks; returns the exit code, 1 if a delivery fails."""
    place = options.gateway.store
    if not is_there(place):
        raise UserError(f"there is no store at {Path(place).absolute()}; give the gateway's --store")
    with one_line_errors(place):
        database, act = Database(place), _list if options.action == "list" else _resend
        return act(options, JobStore(database, owner=""), KeyRing(database))


def _list(options: WebhookOptions, store: JobStore, keys: KeyRing) -> int:
    addresses = {key.id: key.webhook_url for key in keys.all()}
    for job, state in store.with_webhook():
        if state != "delivered":
            ended = datetime.fromtimestamp(job.completed_at, UTC).isoformat(timespec="seconds")
            print(f"{job.id}  {state.replace('_', ' ')}  {job.status} {ended}  {job.key_id}  {addresses[job.key_id]}")
    return 0


def _resend(options: WebhookOptions, store: JobStore, keys: KeyRing) -> int:
    """Sends webhooks, even while a gateway runs; a duplicate is harmless: receivers recognize it by its id."""
    jobs = [
        job
        for job, state in store.with_webhook()
        if options.video == job.id or not options.video and state == "given_up"
    ]
    if options.video and not jobs:
        raise UserError(f"{options.video} is not an ended video of a key with a webhook; `megadit serve webhooks list`")
    results, private = [], options.gateway.private_webhooks
    for job in jobs:
        key = keys.find(job.key_id)
        results.append("key revoked" if key is None or key.is_revoked else send(key, job, may_be_private=private))
        if results[-1].startswith("2"):
            store.note_called(job, "delivered")
        print(f"{job.id}  {results[-1]}")
    return int(not all(result.startswith("2") for result in results))
